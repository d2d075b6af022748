"""`--dry-run` of every way to convert a model of a trillion parameters, on headers over sparse files."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import ROUNDS, SMALLEST, Run, run

LAYERS = 3 if SMALLEST else 61
_START = "import sys, pathlib, huge; path = pathlib.Path(sys.argv[1]); "
HF = f"{_START}form = sys.argv[2]; huge.make_hf(path, huge.kimi_k2(form, {LAYERS}), form)"
MEGATRON = f"{_START}huge.make_megatron(path, huge.kimi_k2('bfloat16', {LAYERS}))"


def rows() -> list[dict[str, Any]]:
    """Seconds and memory of planning, each a whole process; nothing is written."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as directory:
        work = Path(directory)
        # In processes of their own: a child's ru_maxrss starts from the size of the process that it was forked from.
        for form in ("bfloat16", "fp8", "int4"):
            make(HF, str(work / form), form)
        make(MEGATRON, str(work / "megatron"))
        runs: dict[str, list[Run]] = {}
        for _ in range(ROUNDS):
            for what, command in _commands(work).items():
                runs.setdefault(what, []).append(run(command))
    return [_row(what, several) for what, several in runs.items()]


def make(code: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, cwd=Path(__file__).parent)


def _commands(work: Path) -> dict[str, list[str]]:
    """What is measured, by name."""
    ckptkit, target = [sys.executable, "-m", "ckptkit"], str(work / "target")
    return {
        "FP8 -> Megatron": [*ckptkit, "convert", str(work / "fp8"), target, "--dry-run"],
        "INT4 -> Megatron": [*ckptkit, "convert", str(work / "int4"), target, "--dry-run"],
        "bfloat16 -> Megatron": [*ckptkit, "convert", str(work / "bfloat16"), target, "--dry-run"],
        "bfloat16 -> INT4": [*ckptkit, "quantize", str(work / "bfloat16"), target, "--dry-run"],
        "Megatron -> HF": [*ckptkit, "convert", str(work / "megatron"), target, "--dry-run"],
        "Megatron -> INT4": [*ckptkit, "convert", str(work / "megatron"), target, "--quantize", "w4a16", "--dry-run"],
    }


def _row(what: str, runs: list[Run]) -> dict[str, Any]:
    return {
        "what": what,
        "seconds": round(statistics.median(one.seconds for one in runs), 2),
        "peak MiB": max(one.resident for one in runs) >> 20,
        "anonymous MiB": max(one.anonymous for one in runs) >> 20,
    }
