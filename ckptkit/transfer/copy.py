"""The one loop that moves tensors."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from ckptkit.core.allocator import IN_FLIGHT
from ckptkit.core.checkpoint import Checkpoint, CheckpointWriter
from ckptkit.core.errors import CkptkitError, FinalError
from ckptkit.core.extents import Extent, byte_ranges_of, extents_of, is_streamable, read_with
from ckptkit.core.plan import read_and_held
from ckptkit.core.progress import progress
from ckptkit.storage.buffers import BUFFER
from ckptkit.storage.read import ARENA, FileReader
from ckptkit.storage.url import StoreError
from ckptkit.transfer.files import FilesWriter

BATCH = 20 << 20  # bytes that are read at once: groups up to there, or a group
STREAM = ARENA + 3 * BUFFER  # bytes of a thread's buffers: its reader, a piece put together, and two regions of a file
SPARE = 3  # threads more than cores: while some wait for a disk the others compute

Names = Sequence[str]


@dataclass(frozen=True)
class _Batch:
    """Groups that a thread moves at once, in `memory` bytes. `streams`: extents of a single group for a buffer."""

    groups: Sequence[Names]
    memory: int
    streams: Mapping[str, Sequence[Extent]]


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

    `workers` threads (None: `threads`) each take a few groups from reading to writing. Groups go in order, at most
    `memory` bytes of them at a time, or one. What is written does not depend on either.
    """
    groups = source.groups
    if only is not None:
        groups = [kept for names in groups if (kept := tuple(name for name in names if name in only))]
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
    """The default number of workers: one a core and SPARE more, with buffers of no more than `memory` together."""
    return min(cores() + SPARE, max(1, memory // STREAM))


def _copied(
    source: Checkpoint, groups: Sequence[Names], writer: CheckpointWriter, workers: int, memory: int, total: int
) -> Iterator[int]:
    """Moves groups. Yields the bytes of each batch. Raises FinalError where the source has to be repaired first."""
    readers = [FileReader() for _ in range(workers)]

    def move(batch: _Batch) -> int:
        reader = readers.pop()
        try:
            return _move(source, batch, writer, reader)
        finally:
            readers.append(reader)

    pool = ThreadPoolExecutor(workers, "ckptkit-copy")
    running: dict[Future[int], int] = {}
    try:
        # So large that there is room for two a worker, and so small that all have work until the end.
        most = min(memory // (2 * workers), total // (4 * workers))
        for batch in _batches(source, groups, isinstance(writer, FilesWriter), most):
            # One batch more than there are workers, so that none waits for this thread.
            while running and (len(running) > workers or sum(running.values()) + batch.memory > memory):
                yield from _finished(running)
            running[pool.submit(move, batch)] = batch.memory
        while running:
            yield from _finished(running)
    except StoreError:  # it may answer another time
        raise
    except CkptkitError as error:
        raise FinalError.of(error) from error
    finally:
        # What is running ends first: the writer must not be closed under it.
        pool.shutdown(cancel_futures=True)


def _batches(source: Checkpoint, groups: Iterable[Names], streams: bool, memory: int) -> Iterator[_Batch]:
    """Groups in order: as many as BATCH bytes are read of and as take at most `memory`, or one."""
    batch, read, size = list[Names](), 0, 0
    for names in groups:
        stored, held = read_and_held(source, names)
        # Where the bytes of each tensor are, of a group that goes through a buffer.
        places = {name: extents_of(source, name) for name in names} if streams and may_stream(source, names) else {}
        extents = {} if None in places.values() else {name: one for name, one in places.items() if one is not None}
        if batch and (extents or read + stored > BATCH or size + held > memory):
            yield _Batch(batch, size, {})
            batch, read, size = [], 0, 0
        if extents:
            yield _Batch([names], STREAM, extents)
            continue
        batch.append(names)
        read, size = read + stored, size + held
    if batch:
        yield _Batch(batch, size, {})


def _move(source: Checkpoint, batch: _Batch, writer: CheckpointWriter, reader: FileReader) -> int:
    if batch.streams and isinstance(writer, FilesWriter):
        for name, extents in batch.streams.items():
            writer.write_extents(name, extents, reader)
    else:
        reader.load(byte_ranges_of(source, [name for names in batch.groups for name in names]))
        for names in batch.groups:
            for name, tensor in read_with(source, names, reader).items():
                writer.write(name, tensor)
    return sum(source.specs[name].nbytes for names in batch.groups for name in names)


def may_stream(source: Checkpoint, names: Names) -> bool:
    """Whether a group is so large, and copied as it is, that it goes through a buffer. Opens no file."""
    return sum(source.specs[name].nbytes for name in names) > BATCH and all(
        is_streamable(source, name) for name in names
    )


def _finished(running: dict[Future[int], int]) -> list[int]:
    """Waits until a group is written, and takes it off `running`. Raises what a worker raised."""
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        del running[future]
    return [future.result() for future in done]
