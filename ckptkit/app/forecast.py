"""What `--dry-run` says that a job will take: bytes, files, tasks, memory and time, from its plan and a quick measurement of this machine."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ckptkit.app.estimate import Bound, Machines, Throughput, Volume, estimate, measure_throughput
from ckptkit.app.execute import How
from ckptkit.app.jobs import Job, Work
from ckptkit.app.on_ray import batches_of
from ckptkit.core.collector import uncollected
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import read_and_held
from ckptkit.storage.url import is_url
from ckptkit.transfer.copy import STREAM, cores, may_stream, threads

RAY_NODES = (4, 16)
_SHAPE = (512, 4096)  # of the matrix that quantizing and dequantizing are measured with: 4 MiB in bfloat16


@dataclass(frozen=True)
class Row:
    """What the job takes on `nodes` with `workers` each: threads of one process here, or with `ray` processes on nodes like this one.

    `tasks`: files, or with Ray batches of files, which are done as a whole. `memory`: resident bytes at the peak, of the process or of each worker.
    """

    ray: bool
    nodes: int
    workers: int
    tasks: int
    memory: int
    seconds: float
    bound: Bound


@dataclass(frozen=True)
class Forecast:
    """Bytes `read` and `written`, in `files`; `rows` for several machines, from `measured` in the existing `directory`. No rows for a `reason`."""

    read: int
    written: int
    files: int
    directory: str | None = None
    measured: Throughput | None = None
    rows: tuple[Row, ...] = ()
    reason: str | None = None


def forecast(job: Job, work: Work, how: How) -> Forecast:
    """What the job will take. Measures for about a second, in the directory that DST will be made in; nothing is left there."""
    volume = volume_of(work, how.memory)
    found = Forecast(volume.read, volume.written, len(volume.files))
    if is_url(how.path) or is_url(job.src):
        return replace(found, reason="the network is not measured")
    directory = next(parent for parent in Path(how.path).absolute().parents if parent.is_dir())
    try:
        rates = measure_throughput(directory, list(_computing(job, work)))
    except CkptkitError as error:
        return replace(found, reason=error.message)
    here = how.workers or min(cores(), threads(how.memory))
    spare = 0 if how.workers else threads(how.memory) - here
    rows = tuple(rows_of(work, volume, rates, here, spare, how.workers or cores()))
    return replace(found, directory=str(directory), measured=rates, rows=rows)


@uncollected()
def volume_of(work: Work, memory: int) -> Volume:
    """The plan in bytes. Opens no file."""
    read, step = 0, 0
    for output in work.outputs:
        for names in output.view.groups:
            of_group, held = read_and_held(output.view, names)
            read, step = read + of_group, max(step, min(held, STREAM) if may_stream(output.view, names) else held)
    sizes = [output.files.size(file) for file, output in work.files().items()]
    # What it has taken to come as far as this, every worker will take before it reads a tensor.
    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    written = sum(spec.nbytes for output in work.outputs for spec in output.view.specs.values())
    return Volume(read, sizes, step, max(read, written), memory, process)


def rows_of(work: Work, volume: Volume, rates: Throughput, here: int, spare: int, workers: int) -> Iterator[Row]:
    """Threads of one process here: 1, 2, 4 and so on up to `here`, which have `spare` ones beside them; then Ray with `workers` processes a node."""
    for count in sorted({min(1 << power, here) for power in range(here.bit_length() + 1)}):
        found = estimate(volume, rates, Machines(threads=count, spare=spare if count == here else 0))
        yield Row(False, 1, count, found.tasks, found.memory, found.seconds, found.bound)
    for nodes in RAY_NODES:
        batches = [batch.nbytes for batch in batches_of(work, nodes * workers)]
        found = estimate(replace(volume, files=batches), rates, Machines(nodes, workers))
        yield Row(True, nodes, workers, found.tasks, found.memory, found.seconds, found.bound)


def _computing(job: Job, work: Work) -> Iterator[Callable[[], int]]:
    """What a core does for this job beside merging and hashing, on a matrix of this size; each returns its plain bytes."""
    if work.dequantized is not None:
        yield _dequantizing(work.dequantized)
    if job.scheme is not None and job.device == "cpu":
        # Imported here because it compiles kernels.
        from quant.kernels.dispatch import quantize_pack

        scheme, weight = job.scheme, torch.linspace(-1, 1, _SHAPE[0] * _SHAPE[1]).to(torch.bfloat16).reshape(_SHAPE)
        quantize_pack([weight], scheme, ["a matrix"])
        yield lambda: len(quantize_pack([weight], scheme, ["a matrix"])) * weight.nbytes


def _dequantizing(words: str) -> Callable[[], int]:
    rows, columns = _SHAPE
    if words.startswith("FP8"):
        from quant.formats.fp8 import scaled

        codes, scales = (
            torch.zeros(_SHAPE, dtype=torch.uint8).view(torch.float8_e4m3fn),
            torch.ones(rows // 128, columns // 128),
        )
        return lambda: scaled(codes, scales, (128, 128)).nbytes
    from quant.formats.int4 import unpacked
    from quant.formats.packing import CODES_PER_WORD

    packed, groups = (
        torch.zeros(rows, columns // CODES_PER_WORD, dtype=torch.int32),
        torch.ones(rows, columns // 32, dtype=torch.bfloat16),
    )
    return lambda: unpacked(packed, groups, _SHAPE).nbytes


def lines(found: Forecast) -> Sequence[str]:
    """The forecast in words."""
    head = [
        f"reads {found.read / 1e9:.3f} GB, writes {found.written / 1e9:.3f} GB in {found.files} file{'s' * (found.files > 1)}"
    ]
    if found.measured is None:
        return [*head, f"no estimate of time and memory: {found.reason}"]
    rates = found.measured
    said = f"read {rates.read:.2f}, write {rates.write:.2f}, a core {rates.transform:.2f} GB/s"
    return [*head, f"estimate from a quick measurement in {found.directory} ({said}):", *map(_line, found.rows)]


def _line(row: Row) -> str:
    workers = f"{row.workers} worker{'s' * (row.workers > 1)}"
    tasks = f"{row.tasks} task{'s' * (row.tasks > 1)}"
    where = f"Ray, {row.nodes} such nodes of {workers}, {tasks}" if row.ray else f"{workers} here"
    return f"  {where}: {_duration(row.seconds)}, bound by {row.bound}, {row.memory / 1e9:.1f} GB of memory{' a worker' * row.ray}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
