"""How long a job will take and how much memory it needs, from its plan and a quick measurement of the machine.

The model: a worker takes whole output files. On every node its storage moves what is read and written for its files, at the same
time its workers compute, and a file system that nodes share moves everything at most at its own bandwidth. The slowest of these
counts, since reading, computing and writing overlap; what makes it slower than an even division is the node, or the worker, that
gets the most bytes when files are dealt out, largest first, each to whoever has least (Graham 1969, "longest processing time").
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from pathlib import Path
from typing import Literal

import numpy as np
from blake3 import blake3
from zlib_ng import zlib_ng

from ckptkit.core.errors import CkptkitError
from ckptkit.transfer.copy import IN_FLIGHT, STREAM

GB = 1e9
PROCESS = (
    680 << 20
)  # resident bytes of a process before it holds a tensor: Python, torch, their libraries and a plan of ten thousand tensors
START = 5.0  # seconds from a command's start to the first byte: imports
_SAMPLE = 64 << 20
_PIECE = 8 << 20
_LONGEST_S = 0.5

Bound = Literal["storage", "shared storage", "processor"]


@dataclass(frozen=True)
class Throughput:
    """What a machine does, in GB (10^9 bytes) a second: its storage read and written, and one core transforming, in bytes of plain weights."""

    read: float
    transform: float
    write: float

    def __post_init__(self) -> None:
        if min(self.read, self.transform, self.write) <= 0:
            raise CkptkitError(f"a throughput of {self} cannot be right", "measure again, or give GB a second")


@dataclass(frozen=True)
class Volume:
    """A planned job in bytes: what it reads in all, each file that it writes, and the inputs and outputs of its largest step.

    `plain`: bytes that are transformed, of the weights when they are not quantized; None: the larger of what is read and written.
    `memory`: bytes of steps that a worker may have in flight. `process`: resident bytes of a worker that holds no tensor yet.
    """

    read: int
    files: Sequence[int]
    step: int
    plain: int | None = None
    memory: int = IN_FLIGHT
    process: int = PROCESS

    @property
    def written(self) -> int:
        """Bytes written in all."""
        return sum(self.files)

    @property
    def transformed(self) -> int:
        """Bytes that the processor works on."""
        return max(self.read, self.written) if self.plain is None else self.plain


@dataclass(frozen=True)
class Machines:
    """`nodes` with `workers` processes of `threads` each, one a core, and `spare` ones that wait for a disk meanwhile.

    `shared`: GB/s of a file system that holds both sides for all of them; None: each has its own.
    """

    nodes: int = 1
    workers: int = 1
    threads: int = 1
    spare: int = 0
    shared: float | None = None

    def __post_init__(self) -> None:
        if (
            min(self.nodes, self.workers, self.threads) < 1
            or self.spare < 0
            or (self.shared is not None and self.shared <= 0)
        ):
            raise CkptkitError(f"{self} cannot work", "give at least one node, worker and thread")


@dataclass(frozen=True)
class Estimate:
    """`tasks`: what is scheduled as one. `memory`: resident bytes of a worker at its peak. `bound`: what `seconds` follows from."""

    tasks: int
    memory: int
    seconds: float
    bound: Bound


def estimate(work: Volume, rates: Throughput, machines: Machines = Machines()) -> Estimate:
    """What a job will take; pure arithmetic."""
    node, worker = (
        heaviest(work.files, count) / max(work.written, 1)
        for count in (machines.nodes, machines.nodes * machines.workers)
    )
    seconds: dict[Bound, float] = {
        "storage": node * (work.read / rates.read + work.written / rates.write) / GB,
        "processor": worker * work.transformed / (rates.transform * machines.threads) / GB,
    }
    if machines.shared is not None:
        seconds["shared storage"] = (work.read + work.written) / machines.shared / GB
    bound = max(seconds, key=lambda name: seconds[name])
    # One step more than there are threads is in flight, so that none waits; a single one may be larger than the limit.
    threads = machines.threads + machines.spare
    memory = work.process + threads * STREAM + max(work.step, min(work.memory, (threads + 1) * work.step))
    return Estimate(len(work.files), memory, START + seconds[bound], bound)


def heaviest(sizes: Sequence[int], count: int) -> int:
    """The most bytes that one of `count` gets when files are dealt out, largest first, each to whoever has least."""
    loads = [0] * min(count, max(len(sizes), 1))
    heapify(loads)
    for size in sorted(sizes, reverse=True):
        heapreplace(loads, loads[0] + size)
    return max(loads)


def measure_throughput(directory: Path, steps: Sequence[Callable[[], int]] = ()) -> Throughput:
    """Measures this machine for about a second: the storage of `directory`, an existing one, and one core.

    Writes at most 64 MiB to a file that is gone afterwards, to the disk, and reads them back past the page cache where the kernel
    lets go of them. The core puts two halves together and takes BLAKE3 and CRC-32, as writing a Megatron checkpoint does, and then
    does `steps`, each of which returns the bytes of plain weights that it has worked on. Raises CkptkitError when nothing can be written there.
    """
    piece = os.urandom(_PIECE)
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".ckptkit-measure-") as file:
            descriptor = file.fileno()
            write, count = _rate(lambda: _written(descriptor, piece))
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.lseek(descriptor, 0, os.SEEK_SET)
            read, _ = _rate(lambda: len(os.read(descriptor, _PIECE)), count)
    except OSError as error:
        raise CkptkitError(
            f"{directory}: {error.strerror}", "name a directory that exists and can be written to"
        ) from error
    # One after the other: the seconds of a GB add up.
    rates = [_rate(step)[0] for step in (lambda: _transformed(piece), *steps)]
    return Throughput(read, 1 / sum(1 / rate for rate in rates), write)


def _written(descriptor: int, piece: bytes) -> int:
    count = os.write(descriptor, piece)
    os.fdatasync(descriptor)
    return count


def _transformed(piece: bytes) -> int:
    halves = np.frombuffer(piece, np.uint8).reshape(2, -1)
    merged = np.concatenate([halves[1], halves[0]])
    blake3(merged).digest()
    zlib_ng.crc32(merged)
    return len(piece)


def _rate(step: Callable[[], int], most: int = _SAMPLE // _PIECE) -> tuple[float, int]:
    """GB a second of a step that returns how many bytes it moved, repeated at most so often and for half a second; and how often it was."""
    began, moved, count = time.perf_counter(), 0, 0
    while count < most and (not count or time.perf_counter() - began < _LONGEST_S):
        moved, count = moved + step(), count + 1
    return moved / max(time.perf_counter() - began, 1e-9) / GB, count
