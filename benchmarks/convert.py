"""Every way of converting 8.7 GB on cold files, MoE and dense: against `cp -r`, `cat`, and a built model in memory."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import Command, chosen, cold_runs

HERE = Path(__file__).parent
MODELS = ("moe", "dense")


def rows() -> list[dict[str, Any]]:
    """Seconds on files outside the page cache, their ratios to copying and reading the same bytes, and memory."""
    return [row for model in chosen("BENCH_MODELS", MODELS, ["moe-tiny"]) for row in _rows_of(model)]


def _rows_of(model: str) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as directory:
        work = Path(directory)
        # In a process of its own: a child's ru_maxrss starts from the size of the process that it was forked from.
        subprocess.run([sys.executable, "models.py", model, str(work / "hf")], check=True, cwd=HERE)
        runs = cold_runs(_commands(work), [work / "megatron"])
        size = sum(path.stat().st_size for path in (work / "hf").glob("*.safetensors"))
    median = {what: statistics.median(one.seconds for one in found) for what, found in runs.items()}
    settled = {what: statistics.median(one.settled for one in found) for what, found in runs.items()}
    for what, found in runs.items():
        side = "Megatron" if what.startswith(("Megatron", "cp -r Megatron", "cat Megatron", "DCP")) else "HF"
        yield {
            "model": model,
            "what": what,
            "seconds": round(median[what], 2),
            "GB/s read": round(size / median[what] / 1e9, 2),
            "ratio to cp -r": round(median[what] / median[f"cp -r {side}"], 2),
            "on disk": round(settled[what], 2),
            "ratio on disk": round(settled[what] / settled[f"cp -r {side}"], 2),
            "ratio to cat": round(median[what] / median[f"cat {side}"], 2),
            "peak MiB": max(one.resident for one in found) >> 20,
            "anonymous MiB": max(one.anonymous for one in found) >> 20,
        }


def _commands(work: Path) -> dict[str, Command]:
    """What is measured, by name; commands that read the same follow one another."""
    ckptkit, built = [sys.executable, "-m", "ckptkit"], [sys.executable, "-W", "ignore", str(HERE / "built.py")]
    hf, megatron = work / "hf", work / "megatron"
    found: dict[str, Command] = {
        "cat HF": (["sh", "-c", f"cat {hf}/*.safetensors"], hf, None),
        "cp -r HF": (["cp", "-r", str(hf), str(work / "cp")], hf, work / "cp"),
        "HF -> Megatron": ([*ckptkit, "convert", str(hf), str(megatron)], hf, megatron),
        "HF -> INT4": ([*ckptkit, "quantize", str(hf), str(work / "int4")], hf, work / "int4"),
        "HF -> Megatron, built model": ([*built, "to-megatron", str(hf), str(work / "built")], hf, work / "built"),
        "cat Megatron": (["sh", "-c", f"cat {megatron}/release/*.distcp"], megatron, None),
        "cp -r Megatron": (["cp", "-r", str(megatron), str(work / "cp")], megatron, work / "cp"),
        "Megatron -> HF": ([*ckptkit, "convert", str(megatron), str(work / "back")], megatron, work / "back"),
        "Megatron -> INT4": (
            [*ckptkit, "convert", str(megatron), str(work / "int4"), "--quantize", "w4a16"],
            megatron,
            work / "int4",
        ),
        "DCP load, save_file -> HF": (
            [*built, "to-hf", str(megatron / "release"), str(work / "loaded"), str(hf)],
            megatron,
            work / "loaded",
        ),
    }
    return {what: one for what, one in found.items() if os.environ.get("BENCH_BUILT") or one[0][:4] != built}
