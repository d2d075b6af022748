"""Time and peak memory of `ckptkit convert` against the size of a dense model, 0.5 to 16 GB, on cold files."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from convert import HERE
from measure import Command, chosen, cold_runs

SIZES = ("0.5", "1", "2", "4", "8", "16")


def rows() -> list[dict[str, Any]]:
    """A row a size and command."""
    found: list[dict[str, Any]] = []
    for size in chosen("BENCH_SIZES", SIZES, ["0.25"]):
        of_size = list(_rows_of(size))
        print(*of_size, sep="\n", file=sys.stderr, flush=True)
        found += of_size
    return found


def _rows_of(size: str) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as directory:
        work = Path(directory)
        hf, megatron, copied = work / "hf", work / "megatron", work / "copied"
        subprocess.run([sys.executable, "models.py", size, str(hf)], check=True, cwd=HERE)
        ckptkit = [sys.executable, "-m", "ckptkit", "convert"]
        commands: dict[str, Command] = {
            "cp -r": (["cp", "-r", str(hf), str(copied)], hf, copied),
            "HF -> Megatron": ([*ckptkit, str(hf), str(megatron)], hf, megatron),
            # To where it came from: three of the largest are more than many disks have room for.
            "Megatron -> HF": ([*ckptkit, str(megatron), str(hf)], megatron, hf),
        }
        runs = cold_runs(commands, [hf, megatron])
        nbytes = sum(path.stat().st_size for path in hf.glob("*.safetensors"))
    for what, found in runs.items():
        yield {
            "GB": round(nbytes / 1e9, 2),
            "what": what,
            "seconds": round(statistics.median(one.seconds for one in found), 2),
            "on disk": round(statistics.median(one.settled for one in found), 2),
            "anonymous MiB": max(one.anonymous for one in found) >> 20,
        }
