"""`ckptkit quantize` of a whole checkpoint against `cat` of its files to /dev/null: how near it is to the speed of reading."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from measure import ROUNDS, Run, forget, remember, run

MODELS = {"moe": ("cold", "warm"), "moe-12": ("cold",)}  # 8.7 and 16.2 GB; the larger does not fit into the page cache of every machine
CAT = "cat to /dev/null"


def rows() -> list[dict[str, Any]]:
    """Seconds, throughput and memory of both, on files that are not in the page cache ("cold") and that are ("warm")."""
    chosen = os.environ.get("BENCH_MODELS", " ".join(MODELS)).split()
    return [row for model in chosen for row in _rows_of(model, MODELS.get(model, ("cold",)))]


def _rows_of(model: str, states: Sequence[str]) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as directory:
        source, target = Path(directory, "hf"), Path(directory, "int4")
        subprocess.run([sys.executable, "models.py", model, str(source)], check=True, cwd=Path(__file__).parent)
        files = sorted(source.glob("*.safetensors"))
        commands = {
            CAT: ["cat", *map(str, files)],
            "quantize": [sys.executable, "-m", "ckptkit", "quantize", str(source), str(target), "--group-size", "128"],
        }
        runs: dict[tuple[str, str], list[Run]] = {}
        for _ in range(ROUNDS):
            for state in states:
                for what, command in commands.items():
                    (forget if state == "cold" else remember)(files)
                    runs.setdefault((what, state), []).append(run(command, target))
        size = sum(file.stat().st_size for file in files)
    for (what, state), found in runs.items():
        yield _row(what, state, found, runs[CAT, state], size)


def _row(what: str, state: str, runs: list[Run], reading: list[Run], size: int) -> dict[str, Any]:
    seconds, floor = (statistics.median(one.seconds for one in found) for found in (runs, reading))
    return {
        "GB": round(size / 1e9, 1),
        "what": what,
        "page cache": state,
        "seconds": round(seconds, 2),
        "ratio to cat": round(seconds / floor, 2),
        "GB/s read": round(size / seconds / 1e9, 2),
        "peak MiB": max(one.resident for one in runs) >> 20,
        "anonymous MiB": max(one.anonymous for one in runs) >> 20,
    }
