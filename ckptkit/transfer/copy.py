"""The loop that copies tensors from a checkpoint to a writer."""

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

BATCH = 20 << 20  # most bytes of groups to read at once, or one group
STREAM = ARENA + 3 * BUFFER  # bytes of a thread's buffers: its reader, a joined piece, and two regions of a file
SPARE = 3  # more threads than cores: some wait for a disk

Names = Sequence[str]


@dataclass(frozen=True)
class _Batch:
    """Groups that a thread copies at once, in `memory` bytes. `streams`: extents of a single group to stream."""

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
    """Writes every tensor of `source`, or `only` some; after an error the writer discards unfinished output.

    Each of `workers` threads (default: `threads`) reads and writes a few groups at a time, in order, with at most
    `memory` bytes of groups (or one group) in total. The output depends on neither.
    """
    groups = source.groups
    if only is not None:
        groups = [chosen for names in groups if (chosen := tuple(name for name in names if name in only))]
    total = sum(source.specs[name].nbytes for names in groups for name in names)
    try:
        with progress(label, total) as advance:
            for done in _copy_groups(source, groups, writer, workers or threads(memory), memory, total):
                advance(done)
        writer.finish()
    except BaseException:
        writer.discard()
        raise


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(memory: int) -> int:
    """The default number of workers: one per core and SPARE more, with buffers of at most `memory` in total."""
    return min(cores() + SPARE, max(1, memory // STREAM))


def _copy_groups(
    source: Checkpoint, groups: Sequence[Names], writer: CheckpointWriter, workers: int, memory: int, total: int
) -> Iterator[int]:
    """Copies groups. Yields the bytes of each batch. Raises FinalError if the source must be repaired."""
    readers = [FileReader() for _ in range(workers)]

    def copy_batch(batch: _Batch) -> int:
        reader = readers.pop()
        try:
            return _copy_batch(source, batch, writer, reader)
        finally:
            readers.append(reader)

    pool = ThreadPoolExecutor(workers, "ckptkit-copy")
    running: dict[Future[int], int] = {}
    try:
        # Two batches per worker fit into memory, and every worker gets at least four.
        most = min(memory // (2 * workers), total // (4 * workers))
        for batch in _batches(source, groups, isinstance(writer, FilesWriter), most):
            # One more batch than workers, so that no worker waits for this thread.
            while running and (len(running) > workers or sum(running.values()) + batch.memory > memory):
                yield from _wait_for_one(running)
            running[pool.submit(copy_batch, batch)] = batch.memory
        while running:
            yield from _wait_for_one(running)
    except StoreError:  # the store may answer later
        raise
    except CkptkitError as error:
        raise FinalError.of(error) from error
    finally:
        # Waits for running batches, which need the open writer.
        pool.shutdown(cancel_futures=True)


def _batches(source: Checkpoint, groups: Iterable[Names], streams: bool, memory: int) -> Iterator[_Batch]:
    """Groups in order, with at most BATCH bytes to read and `memory` bytes of memory, or one group."""
    batch, read, size = list[Names](), 0, 0
    for names in groups:
        stored, held = read_and_held(source, names)
        # Extents of the tensors of a streamed group.
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


def _copy_batch(source: Checkpoint, batch: _Batch, writer: CheckpointWriter, reader: FileReader) -> int:
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
    """Whether a group is large, and its unchanged bytes can be copied through a buffer. Opens no file."""
    is_large = sum(source.specs[name].nbytes for name in names) > BATCH
    return is_large and all(is_streamable(source, name) for name in names)


def _wait_for_one(running: dict[Future[int], int]) -> list[int]:
    """Waits for a batch, removes it from `running`, and returns its bytes. Raises the worker's exception."""
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        del running[future]
    return [future.result() for future in done]
