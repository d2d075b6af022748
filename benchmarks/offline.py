"""Quantizing against `cat` of its source to /dev/null: how near it is to the speed of reading.

INT4 from HF and from Megatron, and every other scheme from HF.
"""

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

from ckptkit.quant.schemes.registry import NAMES

MODELS = ("moe", "moe-12", "moe-18")  # 8.7, 16.2 and 23.7 GB: the larger, the less do seconds of imports weigh


def rows() -> list[dict[str, Any]]:
    """Seconds, throughput and memory of each, on files that are not in the page cache."""
    return [row for model in chosen("BENCH_MODELS", MODELS, ["moe-tiny"]) for row in _rows_of(model)]


def _rows_of(model: str) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as directory:
        hf, megatron, out = (Path(directory, name) for name in ("hf", "megatron", "out"))
        ckptkit = [sys.executable, "-m", "ckptkit"]
        subprocess.run([sys.executable, "models.py", model, str(hf)], check=True, cwd=Path(__file__).parent)
        subprocess.run([*ckptkit, "convert", str(hf), str(megatron)], check=True)
        commands: dict[str, Command] = {
            "cat HF": (["sh", "-c", f"cat {hf}/*.safetensors"], hf, None),
            **{
                f"HF -> {scheme}": ([*ckptkit, "quantize", str(hf), str(out), "--scheme", scheme], hf, out)
                for scheme in NAMES
            },
            "cat Megatron": (["sh", "-c", f"cat {megatron}/release/*.distcp"], megatron, None),
            "Megatron -> w4a16": (
                [*ckptkit, "convert", str(megatron), str(out), "--quantize", "w4a16"],
                megatron,
                out,
            ),
        }
        runs = cold_runs(commands, [])
        size = sum(path.stat().st_size for path in hf.glob("*.safetensors"))
    seconds = {what: statistics.median(one.settled for one in found) for what, found in runs.items()}
    for what, found in runs.items():
        yield {
            "GB": round(size / 1e9, 1),
            "what": what,
            "on disk": round(seconds[what], 2),
            "ratio to cat": round(seconds[what] / seconds["cat Megatron" if "Megatron" in what else "cat HF"], 2),
            "seconds of processors": round(statistics.median(one.busy for one in found), 1),
            "GB/s read": round(size / seconds[what] / 1e9, 2),
            "peak MiB": max(one.resident for one in found) >> 20,
            "anonymous MiB": max(one.anonymous for one in found) >> 20,
        }
