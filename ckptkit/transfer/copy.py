"""The one loop that moves tensors."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from ckptkit.core.checkpoint import Checkpoint, CheckpointWriter
from ckptkit.core.errors import CkptkitError
from ckptkit.core.extents import Extent
from ckptkit.core.plan import extents_of, moved, passes, places_of
from ckptkit.core.progress import progress
from ckptkit.storage.buffers import BUFFER
from ckptkit.storage.read import ARENA, prefetched
from ckptkit.storage.url import StoreError
from ckptkit.transfer.files import FilesWriter

BATCH = 20 << 20  # bytes that are read at once: groups up to there, or a group
STREAM = (
    ARENA + 3 * BUFFER
)  # what a thread has of buffers: what it reads, a piece put together, and about two regions of what it writes
SPARE = 3  # threads more than cores: while some wait for a disk the others compute
IN_FLIGHT = 512 << 20  # bytes of groups that are read, computed or written at one time

Names = Sequence[str]


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

    `workers` threads (None: `threads`) each take a few groups from reading to writing, groups in order, at most `memory` bytes of them
    at a time, or one. What is written does not depend on either.
    """
    groups = (
        source.groups
        if only is None
        else [kept for names in source.groups if (kept := tuple(name for name in names if name in only))]
    )
    total = sum(source.specs[name].nbytes for names in groups for name in names)
    try:
        with progress(label, total) as advance:
            for done in _copied(source, groups, writer, workers or threads(memory), memory, total):
                advance(done)
        writer.finish()
    except BaseException:
        writer.discard()
        raise


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(memory: int) -> int:
    """How many move groups unless it is said: one a core and SPARE more, and of the buffers of all no more than `memory`."""
    return min(cores() + SPARE, max(1, memory // STREAM))


def _copied(
    source: Checkpoint, groups: Sequence[Sequence[str]], writer: CheckpointWriter, workers: int, memory: int, total: int
) -> Iterator[int]:
    """Moves these groups, of `total` bytes. Yields the bytes of each batch that has been written."""

    def move(batch: Sequence[Names]) -> int:
        try:
            with prefetched(places_of(source, [name for names in batch for name in names])):
                return sum(_move(source, names, writer) for names in batch)
        except CkptkitError as error:
            # A source that is wrong must be mended, and then it is another one; a store may answer another time.
            error.resumable = isinstance(error, StoreError)
            raise

    pool = ThreadPoolExecutor(workers, "ckptkit-copy")
    running: dict[Future[int], int] = {}
    try:
        # So large that there is room for two a worker, and so small that all have work until the end.
        most = min(memory // (2 * workers), total // (4 * workers))
        for batch, size in _batches(source, groups, isinstance(writer, FilesWriter), most):
            # One batch more than there are workers, so that none waits for this thread.
            while running and (len(running) > workers or sum(running.values()) + size > memory):
                yield from _finished(running)
            running[pool.submit(move, batch)] = size
        while running:
            yield from _finished(running)
    finally:
        # What is running ends first: the writer must not be closed under it.
        pool.shutdown(cancel_futures=True)


def _batches(
    source: Checkpoint, groups: Iterable[Names], streams: bool, memory: int
) -> Iterator[tuple[Sequence[Names], int]]:
    """Groups in order, to be read at once, and the bytes of memory that they take: at most `memory`, or a group."""
    batch, read, size = list[Names](), 0, 0
    for names in groups:
        stored, held = moved(source, names)
        if streams and _streamed(source, names):
            held = STREAM
        if batch and (read + stored > BATCH or size + held > memory):
            yield batch, size
            batch, read, size = [], 0, 0
        batch.append(names)
        read, size = read + stored, size + held
    if batch:
        yield batch, size


def _move(source: Checkpoint, names: Names, writer: CheckpointWriter) -> int:
    """Moves one group. Returns its bytes."""
    if isinstance(writer, FilesWriter) and (streams := _streamed(source, names)):
        for name, extents in streams.items():
            writer.write_extents(name, extents)
        return sum(source.specs[name].nbytes for name in names)
    tensors = source.read(names)
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    return sum(tensor.nbytes for tensor in tensors.values())


def may_stream(source: Checkpoint, names: Names) -> bool:
    """Whether a group is large and stays as it is, as far as can be told without opening a file: an embedding need not be held as a whole."""
    return sum(source.specs[name].nbytes for name in names) > BATCH and all(passes(source, name) for name in names)


def _streamed(source: Checkpoint, names: Names) -> dict[str, Sequence[Extent]]:
    """Where the bytes of each tensor of a group stand that goes through a buffer; empty where the group is held."""
    found = (
        {name: extents for name in names if (extents := extents_of(source, name)) is not None}
        if may_stream(source, names)
        else {}
    )
    return found if len(found) == len(names) else {}


def _finished(running: dict[Future[int], int]) -> list[int]:
    """Waits until a group is written, and takes it off `running`. Raises what a worker raised."""
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        del running[future]
    return [future.result() for future in done]
