"""No two files import each other; `make lint` holds the layers (import-linter, pyproject.toml)."""

from __future__ import annotations

import ast
import graphlib
import re
from collections import defaultdict
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ckptkit", "converters", "quant", "verify")


def test_no_two_files_import_each_other() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 300
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules


def test_kinds_of_checkpoints_are_told_apart_in_one_place() -> None:
    compares = re.compile(r"""\.kind [!=]= ["'](hf|megatron)["']|Literal\[["']hf["'], ["']megatron["']\]""")
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    assert [str(file.relative_to(ROOT)) for file in files if compares.search(file.read_text())] == [
        "ckptkit/formats/detect.py"
    ]


# What starts programs, and who may call it: `nvidia-smi`, forks of a witness, the command that `gate` is given and what
# that starts (its own Python by -I), and the one way to start Python.
STARTS = re.compile(
    r"subprocess\.(?:Popen|run|call|check_call|check_output|getoutput|getstatusoutput)"
    r"|os\.(?:system|popen|exec\w+|spawn\w+|posix_spawn\w*|fork|forkpty)|pty\.(?:spawn|fork)"
    r"|(?:torch\.)?multiprocessing\.(?:get_context|Process|Pool|spawn|Manager|set_start_method)"
    r"|\w*\.?ProcessPoolExecutor|mp\.\w+|asyncio\.create_subprocess_\w+"
)
STARTERS = {
    "ckptkit.app.doctor": {"subprocess.run"},
    "ckptkit.app.gate": {"subprocess.Popen"},
    "ckptkit.app.stand_in": {"subprocess.run", "os.execv"},
    "ckptkit.core.isolation": {"subprocess.Popen"},
    "verify.witnesses.megatron.process": {"multiprocessing.get_context"},
}


def test_python_is_started_in_one_place() -> None:
    found: dict[str, set[str]] = {}
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and STARTS.fullmatch(name := ast.unparse(node.func)):
                found.setdefault(module, set()).add(name)
            # By another name, a call would not be found.
            elif isinstance(node, ast.ImportFrom) and node.module in ("subprocess", "multiprocessing", "pty"):
                found.setdefault(module, set()).add(f"from {node.module}")
    assert found == STARTERS


# What every engine, every stack and every process of a witness offers, under one name each.
INTERFACES = {
    *("build", "chosen_for", "configure", "fill", "layout", "left_empty", "share"),
    *("start_process_groups", "steps_after_loading", "serve", "version", "read", "run", "main"),
}


def test_no_public_name_in_verify_means_two_things() -> None:
    homes: dict[str, list[Path]] = defaultdict(list)
    for file in (ROOT / "verify").rglob("*.py"):
        for one in ast.parse(file.read_text()).body:
            if isinstance(one, ast.ClassDef | ast.FunctionDef) and not one.name.startswith("_"):
                homes[one.name].append(file.relative_to(ROOT))
    assert {name: files for name, files in homes.items() if len(files) > 1 and name not in INTERFACES} == {}
    assert all(len(homes[name]) > 1 for name in INTERFACES)
