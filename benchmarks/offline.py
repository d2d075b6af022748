"""`ckptkit quantize` of a whole checkpoint against `cat` of its files to /dev/null: how near it is to the speed of reading."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import ROUNDS, Run, forget, remember, run


def rows() -> list[dict[str, Any]]:
    """Seconds, throughput and memory of both, on files that are not in the page cache ("cold") and that are ("warm")."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as directory:
        source, target = Path(directory, "hf"), Path(directory, "int4")
        subprocess.run([sys.executable, "models.py", "moe", str(source)], check=True, cwd=Path(__file__).parent)
        files = sorted(source.glob("*.safetensors"))
        commands = {
            "cat to /dev/null": ["cat", *map(str, files)],
            "quantize": [sys.executable, "-m", "ckptkit", "quantize", str(source), str(target), "--group-size", "128"],
        }
        runs: dict[tuple[str, str], list[Run]] = {}
        for _ in range(ROUNDS):
            for state, prepare in (("cold", forget), ("warm", remember)):
                for what, command in commands.items():
                    prepare(files)
                    runs.setdefault((what, state), []).append(run(command, target))
        size = sum(file.stat().st_size for file in files)
    return [_row(what, state, found, runs["cat to /dev/null", state], size) for (what, state), found in runs.items()]


def _row(what: str, state: str, runs: list[Run], reading: list[Run], size: int) -> dict[str, Any]:
    seconds, floor = (statistics.median(one.seconds for one in found) for found in (runs, reading))
    return {
        "what": what,
        "page cache": state,
        "seconds": round(seconds, 2),
        "ratio to cat": round(seconds / floor, 2),
        "GB/s read": round(size / seconds / 1e9, 2),
        "peak MiB": max(one.resident for one in runs) >> 20,
        "anonymous MiB": max(one.anonymous for one in runs) >> 20,
    }
