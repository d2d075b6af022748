"""Imports point one way: command line -> verify -> quant -> converters -> core."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ckptkit", "converters", "quant", "verify")
IMPORTERS = {"import_module", "import_apart", "__import__"}
COMMAND_LINE = {f"ckptkit.{name}" for name in ("__init__", "__main__", "api", "cli", "demo", "execute", "forecast", "jobs", "on_ray", "options")}
ALLOWED = {
    "command line": {"command line", "verify", "converters", "quant", "core"},
    "verify": {"verify", "converters", "quant", "core"},
    "converters": {"converters", "core"},
    "quant": {"quant", "converters", "core"},
    "core": {"core"},
}


def layer_of(module: str) -> str:
    """The layer of a module's full name, `__init__` spelled out: `ckptkit.__init__`, `verify.checks`."""
    if module in COMMAND_LINE:
        return "command line"
    package = module.partition(".")[0]
    return "core" if package == "ckptkit" else package


def module_name(root: Path, file: Path) -> str:
    return ".".join(file.relative_to(root).with_suffix("").parts)


def resolved(root: Path, name: str) -> str | None:
    """The module that a dotted name denotes, or None where it is no module of these packages."""
    path = root.joinpath(*name.split("."))
    if path.with_suffix(".py").is_file():
        return name
    return f"{name}.__init__" if name in PACKAGES or path.is_dir() else None


def dotted_names(root: Path, file: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported: at the top, in functions, for type checkers, relative, by `import_module` or by `import_apart`."""
    here = file.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        match node:
            case ast.Import(names=aliases):
                yield from ((node.lineno, alias.name) for alias in aliases)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                start = here[: len(here) - level + 1] if level else ()
                base = ".".join((*start, *([module] if module else [])))
                yield from ((node.lineno, base if resolved(root, f"{base}.{alias.name}") is None else f"{base}.{alias.name}") for alias in aliases)
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(value=str(name)), *_]) if called in IMPORTERS:
                yield node.lineno, name


def violations(root: Path) -> list[str]:
    """`importer:line imports module` for each import that the layers forbid."""
    found = []
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            allowed = ALLOWED[layer_of(module_name(root, file))]
            for line, name in dotted_names(root, file):
                if name.partition(".")[0] not in PACKAGES:
                    continue
                module = resolved(root, name) or f"{name.partition('.')[0]}.__init__"
                if layer_of(module) not in allowed:
                    found.append(f"{file.relative_to(root)}:{line} imports {module}")
    return found


def test_imports_point_one_way() -> None:
    assert violations(ROOT) == []


def test_every_layer_was_read() -> None:
    modules = [module_name(ROOT, file) for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert {layer_of(module) for module in modules} == set(ALLOWED)
    imported = {name for package in PACKAGES for file in (ROOT / package).rglob("*.py") for _, name in dotted_names(ROOT, file)}
    assert {"ckptkit.errors", "converters.planner", "verify.report"} <= imported


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with one module a layer, that imports nothing."""
    for name in (
        "ckptkit/__init__",
        "ckptkit/cli",
        "ckptkit/api",
        "ckptkit/specs",
        "converters/__init__",
        "converters/ops",
        "quant/__init__",
        "quant/scheme",
        "verify/__init__",
        "verify/checks",
    ):
        (tmp_path / name).with_suffix(".py").parent.mkdir(exist_ok=True)
        (tmp_path / name).with_suffix(".py").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("file", "code", "module"),
    [
        ("ckptkit/specs.py", "import verify", "verify.__init__"),
        ("ckptkit/specs.py", "from verify.checks import check", "verify.checks"),
        ("ckptkit/specs.py", "import converters.ops as ops", "converters.ops"),
        ("ckptkit/specs.py", "from quant import scheme", "quant.scheme"),
        ("ckptkit/specs.py", "from ckptkit import api", "ckptkit.api"),
        ("ckptkit/specs.py", "from ckptkit import convert", "ckptkit.__init__"),
        ("ckptkit/specs.py", "from . import cli", "ckptkit.cli"),
        ("ckptkit/specs.py", "from .api import convert", "ckptkit.api"),
        ("ckptkit/specs.py", "def late():\n    from quant.scheme import pack", "quant.scheme"),
        ("ckptkit/specs.py", "if TYPE_CHECKING:\n    from quant.scheme import pack", "quant.scheme"),
        ("ckptkit/specs.py", "importlib.import_module('verify.checks')", "verify.checks"),
        ("ckptkit/specs.py", "import_module('verify.checks')", "verify.checks"),
        ("ckptkit/specs.py", "import_apart('verify.checks')", "verify.checks"),
        ("ckptkit/specs.py", "import json, verify.checks", "verify.checks"),
        ("converters/ops.py", "from quant.scheme import pack", "quant.scheme"),
        ("converters/ops.py", "from verify import checks", "verify.checks"),
        ("converters/ops.py", "import ckptkit", "ckptkit.__init__"),
        ("quant/scheme.py", "from verify.checks import check", "verify.checks"),
        ("quant/scheme.py", "from verify.gone import check", "verify.__init__"),
        ("quant/kernels/marlin.py", "from ckptkit.api import convert", "ckptkit.api"),
        ("verify/checks.py", "from ckptkit.cli import main", "ckptkit.cli"),
        ("verify/checks.py", "from ckptkit.api import convert", "ckptkit.api"),
    ],
)
def test_forbidden_import_is_found(tree: Path, file: str, code: str, module: str) -> None:
    (tree / file).parent.mkdir(exist_ok=True)
    (tree / file).write_text(code + "\n")
    line = 1 + code.count("\n")
    assert violations(tree) == [f"{file}:{line} imports {module}"]


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("ckptkit/cli.py", "from verify.checks import check\nfrom quant import scheme\nimport converters.ops\nfrom ckptkit import api, specs"),
        ("ckptkit/__init__.py", "from ckptkit.api import convert"),
        ("verify/checks.py", "from ckptkit.specs import fold\nfrom quant import scheme\nfrom converters.ops import Copy\nfrom . import checks"),
        ("converters/ops.py", "from ckptkit import specs\nfrom converters import ops\nimport quantile"),
        ("quant/scheme.py", "from ckptkit.specs import fold\nimport torch.ao.quantization"),
        ("ckptkit/specs.py", "import json\nfrom ckptkit.specs import fold\nfrom ckptkit import specs"),
    ],
)
def test_allowed_import_passes(tree: Path, file: str, code: str) -> None:
    (tree / file).write_text(code + "\n")
    assert violations(tree) == []
