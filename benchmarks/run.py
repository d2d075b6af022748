"""`make bench`: time and peak memory of each verb on a 1 GB model, against `cp -r` of the same bytes in the same run.

Runs are interleaved (one of each, then again), medians of three. Prints a table and writes JSON beside it.
Peak memory is the kernel's ru_maxrss of the whole child process: what `/usr/bin/time -v` prints as maximum resident set.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROUNDS = 3
# In a process of its own: a child's ru_maxrss starts from the size of the process that it was forked from.
MAKE = "import sys, pathlib; from ckptkit.demo import DENSE, make_release; make_release('qwen2', DENSE, pathlib.Path(sys.argv[1]), '300MB')"


def measure(command: list[str], product: Path) -> tuple[float, int]:
    """Seconds and peak resident bytes of one command, whose product is removed before it runs; the disk is synced first."""
    shutil.rmtree(product, ignore_errors=True)
    os.sync()
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - began
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{' '.join(command)} failed")
    return seconds, usage.ru_maxrss * 1024


def commands(work: Path) -> dict[str, tuple[list[str], Path]]:
    """What is measured: a name, the command, and what it writes."""
    ckptkit = [sys.executable, "-m", "ckptkit"]
    hf, megatron, back, int4, both = (str(work / name) for name in ("hf", "megatron", "back", "int4", "both"))
    grouped = ["--group-size", "128"]
    return {
        "cp -r HF": (["cp", "-r", hf, str(work / "cp")], work / "cp"),
        "HF -> Megatron": ([*ckptkit, "convert", hf, megatron], work / "megatron"),
        "Megatron -> HF": ([*ckptkit, "convert", megatron, back], work / "back"),
        "HF -> INT4": ([*ckptkit, "quantize", hf, int4, *grouped], work / "int4"),
        "Megatron -> INT4": ([*ckptkit, "convert", megatron, both, "--quantize", "w4a16", *grouped], work / "both"),
    }


def main() -> None:
    """Makes the model, measures, prints."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as directory:
        work = Path(directory)
        subprocess.run([sys.executable, "-c", MAKE, str(work / "hf")], check=True)
        size = sum(path.stat().st_size for path in (work / "hf").iterdir())
        results: dict[str, list[tuple[float, int]]] = {name: [] for name in commands(work)}
        for _ in range(ROUNDS):
            for name, (command, product) in commands(work).items():
                results[name].append(measure(command, product))
    baseline = statistics.median(seconds for seconds, _ in results["cp -r HF"])
    table = Table(title=f"{size / 1e9:.2f} GB of bf16 (the sizes of Qwen2.5-0.5B), medians of {ROUNDS}", title_justify="left")
    for column in ("what", "seconds", "x cp -r", "peak MiB"):
        table.add_column(column, justify="left" if column == "what" else "right")
    rows = []
    for name, runs in results.items():
        seconds, peak = statistics.median(run[0] for run in runs), max(run[1] for run in runs)
        rows.append({"what": name, "seconds": round(seconds, 3), "ratio": round(seconds / baseline, 2), "peak_bytes": peak})
        table.add_row(name, f"{seconds:.2f}", f"{seconds / baseline:.2f}", f"{peak / 2**20:.0f}")
    Console().print(table)
    Path("bench.json").write_text(json.dumps({"bytes": size, "rounds": ROUNDS, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
