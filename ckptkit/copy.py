"""The one loop that moves tensors."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from ckptkit.checkpoint import Checkpoint, CheckpointWriter
from ckptkit.errors import CkptkitError
from ckptkit.files import FilesWriter
from ckptkit.plan import extents_of, footprint, passes
from ckptkit.progress import progress
from ckptkit.raw import BUFFER, SCRATCH, Extent
from ckptkit.store import StoreError

STREAMED = 1 << 20  # bytes from which on a group that stays as it is goes through a buffer: that is faster too, memory being used again
STREAM = 2 * BUFFER + SCRATCH  # bytes of it that are held then, at most: what a thread has of buffers
SPARE = 2  # threads more than cores: while some wait for a disk the others compute
IN_FLIGHT = 512 << 20  # bytes of groups that are read, computed or written at one time


def copy(
    source: Checkpoint,
    writer: CheckpointWriter,
    label: str,
    workers: int | None = None,
    *,
    only: Collection[str] | None = None,
    memory: int = IN_FLIGHT,
) -> None:
    """Writes every tensor of `source`, or `only` some; on any error the writer discards what it has begun.

    `workers` threads (None: `threads`) each take a group from reading to writing, groups in order, at most `memory` bytes of them at a
    time, or one. What is written does not depend on either.
    """
    groups = source.groups if only is None else [kept for names in source.groups if (kept := tuple(name for name in names if name in only))]
    total = sum(source.specs[name].nbytes for names in groups for name in names)
    try:
        with progress(label, total) as advance:
            for done in _copied(source, groups, writer, workers or threads(memory), memory):
                advance(done)
        writer.finish()
    except BaseException:
        writer.discard()
        raise


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads(memory: int) -> int:
    """How many move groups unless it is said: one a core and SPARE more, and of the buffers of all no more than `memory`."""
    return min(cores() + SPARE, max(1, memory // STREAM))


def _copied(source: Checkpoint, groups: Sequence[Sequence[str]], writer: CheckpointWriter, workers: int, memory: int) -> Iterator[int]:
    """Moves these groups. Yields the bytes of each that has been written."""

    def move(names: Sequence[str]) -> int:
        try:
            return _move(source, names, writer)
        except CkptkitError as error:
            # A source that is wrong must be mended, and then it is another one; a store may answer another time.
            error.resumable = isinstance(error, StoreError)
            raise

    pool = ThreadPoolExecutor(workers, "ckptkit-copy")
    running: dict[Future[int], int] = {}
    try:
        for names in groups:
            size = footprint(source, names)
            if size > STREAM and isinstance(writer, FilesWriter) and _streamed(source, names):
                size = STREAM
            # One group more than there are workers, so that none waits for this thread.
            while running and (len(running) > workers or sum(running.values()) + size > memory):
                yield from _finished(running)
            running[pool.submit(move, names)] = size
        while running:
            yield from _finished(running)
    finally:
        # What is running ends first: the writer must not be closed under it.
        pool.shutdown(cancel_futures=True)


def _move(source: Checkpoint, names: Sequence[str], writer: CheckpointWriter) -> int:
    """Moves one group. Returns its bytes."""
    if isinstance(writer, FilesWriter) and (streams := _streamed(source, names)):
        for name, extents in streams.items():
            writer.write_extents(name, extents)
        return sum(source.specs[name].nbytes for name in names)
    tensors = source.read(names)
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    return sum(tensor.nbytes for tensor in tensors.values())


def may_stream(source: Checkpoint, names: Sequence[str]) -> bool:
    """Whether a group is large and stays as it is, as far as can be told without opening a file: an embedding need not be held as a whole."""
    return sum(source.specs[name].nbytes for name in names) >= STREAMED and all(passes(source, name) for name in names)


def _streamed(source: Checkpoint, names: Sequence[str]) -> dict[str, Sequence[Extent]]:
    """Where the bytes of each tensor of a group stand that goes through a buffer; empty where the group is held."""
    found = {name: extents for name in names if (extents := extents_of(source, name)) is not None} if may_stream(source, names) else {}
    return found if len(found) == len(names) else {}


def _finished(running: dict[Future[int], int]) -> list[int]:
    """Waits until a group is written, and takes it off `running`. Raises what a worker raised."""
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        del running[future]
    return [future.result() for future in done]
