"""`ckptkit quantize --search mse` on a Ray cluster of this machine: throughput at 2 workers against 1.

The cluster is up, and its workers have planned the run; what is timed is a whole call of `ckptkit.quantize`.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measure import ROUNDS, SMALLEST
from models import DENSE, make

from ckptkit.app.api import quantize
from ckptkit.quant.schemes.w4a16 import int4_scheme
from ckptkit.transfer.ray import ray_cluster

# 0.13 GB, of which 0.1 GB is quantized: the search takes a core half a minute. No file is so large that a worker waits.
CONFIG = DENSE | {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 1 if SMALLEST else 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHARD_BYTES = 2_000_000
WORKERS = (1, 2)


def rows() -> list[dict[str, Any]]:
    """A row a number of workers. Nothing where Ray is not installed or there is one core only."""
    if find_spec("ray") is None or len(os.sched_getaffinity(0)) < max(WORKERS):
        return []
    seconds: dict[int, list[float]] = {workers: [] for workers in WORKERS}
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as directory:
        source, target = Path(directory, "hf"), Path(directory, "int4")
        make(CONFIG | {"vocab_size": 16384}, source, SHARD_BYTES)
        size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        with ray_cluster("local", max(WORKERS)):
            _seconds(source, target, max(WORKERS))  # starts them
            for _ in range(ROUNDS):
                for workers in WORKERS:
                    seconds[workers].append(_seconds(source, target, workers))
    median = {workers: statistics.median(found) for workers, found in seconds.items()}
    return [
        {
            "workers": workers,
            "seconds": round(median[workers], 2),
            "MB/s read": round(size / median[workers] / 1e6, 2),
            "throughput to 1 worker's": round(median[1] / median[workers], 2),
        }
        for workers in WORKERS
    ]


def _seconds(source: Path, target: Path, workers: int) -> float:
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    began = time.monotonic()
    quantize(source, target, int4_scheme(search="mse"), workers=workers, ray="auto")
    return time.monotonic() - began
