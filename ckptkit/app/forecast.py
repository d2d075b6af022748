"""Forecasts bytes, memory and seconds of a run for `--dry-run`, from its plan and a measurement of the disk."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ckptkit.app.plan import ConversionPlan
from ckptkit.app.run_options import RunOptions
from ckptkit.core.plan import read_and_held
from ckptkit.core.progress import size
from ckptkit.quant.schemes.registry import Scheme, scheme_module
from ckptkit.storage.url import is_url
from ckptkit.transfer.copy import STREAM, cores, may_stream, threads

START = 5.0  # seconds from a command's start to the first byte: imports
_TORCH = 480 << 20  # resident bytes of importing torch 2.11
_PIECE, _PIECES = 8 << 20, 8
_MAX_S = 0.5
_MATRIX = (512, 4096)  # for measuring slow schemes: 4 MiB in bfloat16


@dataclass(frozen=True)
class Forecast:
    """The cost of a run: bytes read, bytes written in `files`, peak resident `memory` of the process or of each worker
    with Ray, and `seconds` on this machine, or the `reason` why they are unknown.
    """

    read: int
    written: int
    files: int
    memory: int
    seconds: float | None = None
    reason: str | None = None


def forecast(options: RunOptions, plan: ConversionPlan) -> Forecast:
    """Forecasts a run. Measures the disk of the destination with a temporary file, for about a second."""
    cost = forecast_bytes(options, plan)
    if is_url(options.dst) or is_url(options.src):
        return replace(cost, reason="the network is not measured")
    if options.ray is not None:
        return replace(cost, reason="the cluster is not measured")
    directory = next(parent for parent in Path(options.dst).absolute().parents if parent.is_dir())
    try:
        read, write = disk_rates(directory)
    except OSError as error:
        return replace(cost, reason=f"{directory}: {error.strerror}")
    seconds = cost.read / read + cost.written / write
    if options.scheme is not None and options.scheme.is_slow and options.device == "cpu":
        workers = min(options.workers or cores(), cores())
        seconds = max(seconds, max(cost.read, cost.written) / (quantizing_rate(options.scheme) * workers))
    return replace(cost, seconds=START + seconds)


def forecast_bytes(options: RunOptions, plan: ConversionPlan, process: int | None = None) -> Forecast:
    """Bytes and memory of a run, from its plan. `process`: resident bytes after planning, or None for this process."""
    read, step = 0, 0
    for output in plan.outputs:
        for names in output.view.groups:
            group_read, held = read_and_held(output.view, names)
            read, step = read + group_read, max(step, min(held, STREAM) if may_stream(output.view, names) else held)
    files = [output.files.size(file) for file, output in plan.files().items()]
    # Every worker also plans before it reads a tensor.
    if process is None:
        process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        process += 0 if "torch" in sys.modules else _TORCH
    workers = 1 if options.ray is not None else options.workers or threads(options.memory)
    # One more step than threads is in flight, so that no thread waits; a single step may exceed the limit.
    memory = process + workers * STREAM + max(step, min(options.memory, (workers + 1) * step))
    return Forecast(read, sum(files), len(files), memory)


def disk_rates(directory: Path) -> tuple[float, float]:
    """Measures bytes per second of reading and writing a directory's disk, with at most 64 MiB. Raises OSError."""
    piece = os.urandom(_PIECE)
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".ckptkit-measure-") as file:
        descriptor = file.fileno()

        def write() -> None:
            os.write(descriptor, piece)
            os.fdatasync(descriptor)

        seconds, count = _repeated(write, _PIECES)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        reading, _ = _repeated(lambda: os.read(descriptor, _PIECE), count)
    return count * _PIECE / reading, count * _PIECE / seconds


def quantizing_rate(scheme: Scheme) -> float:
    """Bytes of bfloat16 weights per second that one core quantizes."""
    import torch  # not required for other forecasts

    quantize = scheme_module(scheme.name).quantize_sample
    weight = torch.linspace(-1, 1, _MATRIX[0] * _MATRIX[1]).to(torch.bfloat16).reshape(_MATRIX)
    quantize(weight, scheme)
    seconds, count = _repeated(lambda: quantize(weight, scheme), _PIECES)
    return count * weight.nbytes / seconds


def _repeated(step: Callable[[], object], most: int) -> tuple[float, int]:
    """Repeats a step at most `most` times and for half a second. Returns the seconds and the number of repetitions."""
    began, count = time.perf_counter(), 0
    while count < most and (not count or time.perf_counter() - began < _MAX_S):
        step()
        count += 1
    return max(time.perf_counter() - began, 1e-9), count


def lines(cost: Forecast) -> list[str]:
    """Formats a forecast."""
    total = f"reads {size(cost.read)}, writes {size(cost.written)}"
    head = f"{total} in {cost.files} file{'s' * (cost.files > 1)}, needs {size(cost.memory)} of memory"
    if cost.seconds is None:
        return [head, f"no estimate of time: {cost.reason}"]
    time = f"{cost.seconds / 60:.0f} min" if cost.seconds >= 600 else f"{cost.seconds:.0f} s"
    return [head, f"takes about {time}"]
