"""The SGLang witness against SGLang's own load of the same 8.7 GB, a mixture of experts and a dense model.

Both build the model with SGLang's loader in a process of their own. Timed is what follows building: loading and, on a
GPU, what SGLang does after it; the witness also poisons, traces and compares every value, which it reads a second time.
The files are in the page cache, or they are not. `process` is the whole process, with imports and building.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

MODELS = ("moe", "dense")


def rows() -> list[dict[str, Any]]:
    """Median seconds of both and their ratio; none without SGLang."""
    # Not at the top: the part below runs with -P, which hides measure.py.
    from measure import chosen

    if find_spec("sglang") is None:
        return []
    return [row for model in chosen("BENCH_MODELS", MODELS, ["moe-tiny"]) for row in _rows(model)]


def _rows(model: str) -> Iterator[dict[str, Any]]:
    from measure import ROUNDS, SMALLEST

    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as directory:
        hf = Path(directory) / "hf"
        subprocess.run([sys.executable, "models.py", model, str(hf)], check=True, cwd=Path(__file__).parent)
        for files in ["on disk", "in the page cache"][SMALLEST:]:
            seconds: dict[str, list[float]] = {"own": [], "witness": []}
            whole: dict[str, list[float]] = {"own": [], "witness": []}
            for _ in range(ROUNDS):
                for how, found in seconds.items():
                    if files == "on disk":
                        _forget(hf)
                    began = time.monotonic()
                    found.append(_timed(how, hf))
                    whole[how].append(time.monotonic() - began)
            own, witness = (statistics.median(seconds[how]) for how in ("own", "witness"))
            processes = [statistics.median(whole[how]) for how in ("own", "witness")]
            yield {
                "model": model,
                "files": files,
                "SGLang's own load": round(own, 2),
                "witness": round(witness, 2),
                "ratio": round(witness / own, 2),
                "process": round(processes[1] / processes[0], 2),
            }


def _forget(hf: Path) -> None:
    """Takes the files out of the page cache."""
    for file in hf.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _timed(how: str, hf: Path) -> float:
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-P", "-W", "ignore", __file__, how, str(hf), scratch]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return float(done.stdout.split()[-1])


def main(how: str, hf: Path, scratch: Path) -> None:
    """Loads the model in this process, and prints how long that took."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    from ckptkit.formats.hf.reader import read_json
    from ckptkit.verify.witnesses.loading.engine import ModelBuild
    from ckptkit.verify.witnesses.loading.examine import examine
    from ckptkit.verify.witnesses.loading.job import LoadReport
    from ckptkit.verify.witnesses.loading.process import safetensors_of
    from ckptkit.verify.witnesses.process.exit_report import ExitReport
    from ckptkit.verify.witnesses.sglang import adapter

    seconds, reports = 0.0, list[LoadReport]()
    build = ModelBuild(hf, scratch, read_json(hf / "config.json"), reference=lambda: safetensors_of(hf))

    def timed(model: Any, weights: Any, device: Any) -> None:
        nonlocal seconds
        began = time.monotonic()
        if how == "witness":
            reports.append(examine(adapter, build, phases, model, weights, device).report)
        else:
            DefaultModelLoader.load_weights_and_postprocess(model, weights, device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.monotonic() - began

    with ExitReport(scratch / "report") as phases:
        adapter.build(build, timed, phases)
        for report in reports:
            if report.unwritten or report.dropped or report.differing or report.repacked:
                raise SystemExit(f"the witness finds fault with a sound model: {report}")
    print(seconds)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
