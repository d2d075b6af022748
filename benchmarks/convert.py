"""Time and memory of converting a 1 GB model, each way and to INT4, against `cp -r` of the same bytes."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import Run, remember, run

ROUNDS = 3
# In a process of its own: a child's ru_maxrss starts from the size of the process that it was forked from.
MAKE = "import sys, pathlib; from ckptkit.demo import DENSE, make_release; make_release('qwen2', DENSE, pathlib.Path(sys.argv[1]), '300MB')"


def rows() -> list[dict[str, Any]]:
    """Seconds, the ratio to `cp -r` and memory of each command, with the source in the page cache."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as directory:
        work = Path(directory)
        subprocess.run([sys.executable, "-c", MAKE, str(work / "hf")], check=True)
        runs: dict[str, list[Run]] = {}
        for _ in range(ROUNDS):
            for what, (command, source, product) in _commands(work).items():
                remember([path for path in source.rglob("*") if path.is_file()])
                runs.setdefault(what, []).append(run(command, product))
    copying = statistics.median(one.seconds for one in runs["cp -r HF"])
    return [_row(what, found, copying) for what, found in runs.items()]


def _commands(work: Path) -> dict[str, tuple[list[str], Path, Path]]:
    """What is measured: a name, the command, what it reads and what it writes."""
    ckptkit = [sys.executable, "-m", "ckptkit"]
    hf, megatron = work / "hf", work / "megatron"
    return {
        "cp -r HF": (["cp", "-r", str(hf), str(work / "cp")], hf, work / "cp"),
        "HF -> Megatron": ([*ckptkit, "convert", str(hf), str(megatron)], hf, megatron),
        "Megatron -> HF": ([*ckptkit, "convert", str(megatron), str(work / "back")], megatron, work / "back"),
        "HF -> INT4": ([*ckptkit, "quantize", str(hf), str(work / "int4")], hf, work / "int4"),
        "Megatron -> INT4": ([*ckptkit, "convert", str(megatron), str(work / "both"), "--quantize", "w4a16"], megatron, work / "both"),
    }


def _row(what: str, runs: list[Run], copying: float) -> dict[str, Any]:
    seconds = statistics.median(one.seconds for one in runs)
    memory = {"peak MiB": max(one.resident for one in runs) >> 20, "anonymous MiB": max(one.anonymous for one in runs) >> 20}
    return {"what": what, "seconds": round(seconds, 2), "ratio to cp -r": round(seconds / copying, 2), **memory}
