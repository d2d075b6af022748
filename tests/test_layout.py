"""The layout of the packages: imports point one way, no two files import each other, and folders stay small."""

from __future__ import annotations

import ast
import graphlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Each may import itself and those before it; nothing imports the command line, which is the rest of `ckptkit`.
LAYERS = (
    "ckptkit.core",
    "ckptkit.storage",
    "ckptkit.formats",
    "ckptkit.transfer",
    "converters",
    "quant",
    "verify",
    "ckptkit",
)
MAX_FOLDER = 15
MAX_FUNCTION = 60
MAX_PARAMETERS = 8


def modules(root: Path) -> dict[str, Path]:
    """Every module of the packages by its dotted name; a package is its `__init__`."""
    files = (
        file for package in ("ckptkit", "converters", "quant", "verify") for file in (root / package).rglob("*.py")
    )
    return {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imported(file: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the packages that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        match node:
            case ast.Import(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(base), names=aliases):
                names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in aliases]
            case ast.Call(
                func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                names = [name]
            case _:
                continue
        yield from (name for name in names if name in known)


def layer(module: str) -> int:
    """The first layer whose name the module's begins with."""
    return next(index for index, name in enumerate(LAYERS) if f"{module}.".startswith(f"{name}."))


def upward(root: Path) -> list[str]:
    """`importer imports module` for each import against the order of LAYERS."""
    known = modules(root)
    return [
        f"{module} imports {name}"
        for module, file in sorted(known.items())
        for name in imported(file, known)
        if layer(name) > layer(module)
    ]


def test_layers_import_only_those_before_them() -> None:
    assert upward(ROOT) == []


def stated(init: Path) -> list[str] | None:
    """What a folder's `__init__` says that it may import, besides itself; None where it says nothing."""
    for node in ast.parse(init.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MAY_IMPORT":
            return list(ast.literal_eval(node.value))
    return None


def test_folders_import_only_what_they_state() -> None:
    known = modules(ROOT)
    wrong, unused = [], []
    for folder, init in known.items():
        if init.name != "__init__.py":
            continue
        may = stated(init)
        assert may is not None, f"{folder} states no MAY_IMPORT"
        found = {
            name
            for module, file in known.items()
            if file.parent == init.parent
            for name in imported(file, known)
            if not f"{name}.".startswith(f"{folder}.")
        }
        covered = {one: {name for name in found if f"{name}.".startswith(f"{one}.")} for one in may}
        wrong += [f"{folder} imports {name}" for name in sorted(found.difference(*covered.values()))]
        unused += [f"{folder} does not import {one}" for one, names in covered.items() if not names]
    assert (wrong, unused) == ([], [])


def test_no_two_files_import_each_other() -> None:
    known = modules(ROOT)
    graph = {module: {name for name in imported(file, known) if name != module} for module, file in known.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, naming the modules


def test_every_layer_has_modules_and_imports() -> None:
    known = modules(ROOT)
    assert {layer(module) for module in known} == set(range(len(LAYERS)))
    everything = {name for file in known.values() for name in imported(file, known)}
    assert {"ckptkit.core.errors", "converters.planner", "verify.report"} <= everything


def test_folders_hold_few_modules() -> None:
    count = Counter(file.parent for file in modules(ROOT).values() if file.name != "__init__.py")
    assert {str(folder): size for folder, size in count.items() if size > MAX_FOLDER} == {}


def test_folders_say_what_they_are_for() -> None:
    folders = {file.parent for file in modules(ROOT).values()}
    assert [
        str(folder) for folder in folders if not ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    ] == []


def test_kinds_of_checkpoints_are_told_apart_in_one_place() -> None:
    known = {module: file.read_text() for module, file in modules(ROOT).items()}
    compares = re.compile(r"""\.kind [!=]= ["'](hf|megatron)["']|Literal\[["']hf["'], ["']megatron["']\]""")
    assert {module for module, text in known.items() if compares.search(text)} == {"ckptkit.formats.detect"}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function and method of the packages, as `module.name`."""
    for module, file in modules(ROOT).items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{module}.{node.name}", node


def decorated(node: ast.FunctionDef | ast.AsyncFunctionDef, *words: str) -> bool:
    return any(word in ast.unparse(one) for one in node.decorator_list for word in words)


def test_functions_fit_on_a_page() -> None:
    assert {name for name, node in functions() if (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION} == set()


def test_public_functions_take_few_parameters() -> None:
    """A command has one for each of its options, a kernel of Triton one for each pointer and size."""
    many = set()
    for name, node in functions():
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        counted = [one for one in given if one.arg not in ("self", "cls")]
        if len(counted) > MAX_PARAMETERS and not decorated(node, "click", "command", "triton.jit"):
            many.add(name)
    assert many == set()


# What starts programs, and who may call it: `nvidia-smi`, forks of a witness, and the one way to start Python.
STARTS = re.compile(
    r"subprocess\.(?:Popen|run|call|check_call|check_output|getoutput|getstatusoutput)"
    r"|os\.(?:system|popen|exec\w+|spawn\w+|posix_spawn\w*|fork|forkpty)|pty\.(?:spawn|fork)"
    r"|(?:torch\.)?multiprocessing\.(?:get_context|Process|Pool|spawn|Manager|set_start_method)"
    r"|\w*\.?ProcessPoolExecutor|mp\.\w+|asyncio\.create_subprocess_\w+"
)
STARTERS = {
    "ckptkit.app.doctor": {"subprocess.run"},
    "ckptkit.core.isolation": {"subprocess.Popen"},
    "verify.witnesses.megatron.process": {"multiprocessing.get_context"},
}


def test_python_is_started_in_one_place() -> None:
    found: dict[str, set[str]] = {}
    for module, file in modules(ROOT).items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and STARTS.fullmatch(name := ast.unparse(node.func)):
                found.setdefault(module, set()).add(name)
            # By another name, a call would not be found.
            elif isinstance(node, ast.ImportFrom) and node.module in ("subprocess", "multiprocessing", "pty"):
                found.setdefault(module, set()).add(f"from {node.module}")
    assert found == STARTERS


@pytest.mark.parametrize(
    ("module", "code", "name"),
    [
        ("ckptkit.core.specs", "import verify", "verify"),
        ("ckptkit.core.specs", "from ckptkit.storage import read", "ckptkit.storage.read"),
        ("ckptkit.storage.read", "from ckptkit import cli", "ckptkit.cli"),
        ("converters.ops", "def late():\n    from quant.scheme import pack", "quant.scheme"),
        ("converters.ops", "if TYPE_CHECKING:\n    from quant.scheme import pack", "quant.scheme"),
        ("quant.scheme", "importlib.import_module('verify.check')", "verify.check"),
        ("verify.check", "import ckptkit", "ckptkit"),
    ],
)
def test_import_of_a_later_layer_is_found(tmp_path: Path, module: str, code: str, name: str) -> None:
    names = ("ckptkit.__init__", "ckptkit.cli", "ckptkit.core.specs", "ckptkit.storage.read")
    for one in (*names, "converters.ops", "quant.scheme", "verify.__init__", "verify.check"):
        file = tmp_path.joinpath(*one.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code if one == module else "")
    assert upward(tmp_path) == [f"{module} imports {name}"]
