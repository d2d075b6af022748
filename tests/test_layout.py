"""No two files import each other; `make lint` holds the layers (import-linter, pyproject.toml)."""

from __future__ import annotations

import graphlib
import re
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
