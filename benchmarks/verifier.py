"""`ckptkit verify` against a source, compared with `cat` of both sides; and header checks of a trillion parameters."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import ROUNDS, SMALLEST, Run, chosen, forget, remember, run
from plan import HF, make

HERE = Path(__file__).parent
SIZES = chosen("BENCH_SIZES", ["1", "4"], ["0.25", "0.35"])


def rows() -> list[dict[str, Any]]:
    """Seconds, the ratio to `cat` of both sides on files outside the page cache ("cold") or in it ("warm"), and memory.

    Two sizes tell start-up from throughput: "start-up" is what is left at none, "each further GB" what one more takes.
    """
    found = []
    for size in SIZES:
        with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as directory:
            found += [{"GB": size, **row} for row in _values(Path(directory), size)]
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as directory:
        return found + list(_apart(found)) + [{"GB": "", **row} for row in _headers(Path(directory) / "kimi")]


def _values(work: Path, size: str) -> list[dict[str, Any]]:
    # In processes of their own: a child's ru_maxrss starts from the size of the process that it was forked from.
    ckptkit, hf, megatron = [sys.executable, "-m", "ckptkit"], work / "hf", work / "megatron"
    subprocess.run([sys.executable, "models.py", size, str(hf)], check=True, cwd=HERE)
    subprocess.run([*ckptkit, "convert", str(hf), str(megatron)], check=True, stdout=subprocess.DEVNULL)
    shutil.copytree(hf, work / "copy")
    found = []
    for name, checkpoint, pattern in (
        ("an HF copy", work / "copy", "*.safetensors"),
        ("Megatron", megatron, "release/*.distcp"),
    ):
        files = sorted([*hf.glob("*.safetensors"), *checkpoint.glob(pattern)])
        commands = {
            f"cat of HF and {name}": ["cat", *map(str, files)],
            f"verify {name} against HF": [*ckptkit, "verify", str(checkpoint), "--source", str(hf)],
        }
        for state, prepare in [("cold", forget), ("warm", remember)][SMALLEST:]:
            runs: dict[str, list[Run]] = {what: [] for what in commands}
            for _ in range(ROUNDS):
                for what, command in commands.items():
                    prepare(files)
                    runs[what].append(run(command))
            reading = statistics.median(one.seconds for one in next(iter(runs.values())))
            found += [_row(what, one, reading, state) for what, one in runs.items()]
    return found


def _apart(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    smaller, larger = ([row for row in found if row["GB"] == size] for size in SIZES)
    slopes = [
        (above["seconds"] - below["seconds"]) / (float(SIZES[1]) - float(SIZES[0]))
        for below, above in zip(smaller, larger, strict=True)
    ]
    reading = 0.0
    for row, slope in zip(smaller, slopes, strict=True):
        about = {"GB": "", "what": row["what"], "page cache": row["page cache"]}
        if row["what"].startswith("cat "):
            reading = slope
            continue
        yield about | {
            "what": f"{row['what']}, start-up",
            "seconds": round(row["seconds"] - float(SIZES[0]) * slope, 2),
        }
        ratio = {"ratio to cat": round(slope / reading, 2)} if reading > 0 else {}
        yield about | {"what": f"{row['what']}, each further GB", "seconds": round(slope, 2), **ratio}


def _headers(path: Path) -> list[dict[str, Any]]:
    make(HF, str(path), "int4")
    command = [sys.executable, "-m", "ckptkit", "preflight", "--hf-checkpoint", str(path)]
    return [_row("header checks of Kimi K2 in INT4, 207,000 keys", [run(command) for _ in range(ROUNDS)], None, "warm")]


def _row(what: str, runs: list[Run], reading: float | None, state: str) -> dict[str, Any]:
    seconds = statistics.median(one.seconds for one in runs)
    memory = {
        "peak MiB": max(one.resident for one in runs) >> 20,
        "anonymous MiB": max(one.anonymous for one in runs) >> 20,
    }
    return {
        "what": what,
        "page cache": state,
        "seconds": round(seconds, 2),
        "ratio to cat": round(seconds / reading, 2) if reading else "",
        **memory,
    }
