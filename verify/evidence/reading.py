"""Reads all the bytes of a checkpoint and its source in one pass, with few tensors in memory: threads, or Ray.

The same pass hashes whole files, where the model hub's client has recorded the hash of what it downloaded.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.extents import Reader, byte_ranges_of
from ckptkit.core.progress import progress
from ckptkit.formats.hf.hub_cache import Download, downloads_in
from ckptkit.formats.hf.reader import INDEX, HfCheckpoint
from ckptkit.formats.hf.side_files import is_own, is_weight, weights_at
from ckptkit.storage.file_hash import FileHash
from ckptkit.storage.fingerprint import fingerprint
from ckptkit.transfer.ray import connected, cpus, outcomes, pieces_of
from converters.experts import is_fused
from converters.foreign import refuse_foreign, refuse_stated
from verify.evidence.hf_files import HfFiles
from verify.evidence.subject import Subject
from verify.evidence.values import Groups, Values, common_groups, look, sides

if TYPE_CHECKING:
    from torch import Tensor

_MEMORY = 8 << 30  # bytes of tensors in memory over all threads; a single group may need more


def read_values(subject: Subject) -> Values:
    """Reads everything once, group by group. With a source, both sides are seen as HF and compared as they come by."""
    return _pass(subject, stored=False)


def stored_values(subject: Subject) -> Values:
    """The same of every tensor under its name on disk: from the one pass where that is how it names them."""
    fused = subject.is_hf and is_fused(subject.checkpoint.specs)
    if not fused and (subject.is_hf or subject.source_path is None):
        return subject.once(read_values)
    return _pass(subject, stored=True)


def downloads(subject: Subject) -> Mapping[str, Download]:
    """What the model hub's client has recorded of the files of an HF directory, by relative name."""
    return downloads_in(subject.path) if subject.is_hf else {}


def file_hashes(subject: Subject) -> Mapping[str, FileHash]:
    """The files to compare with such a record: those of weights that loaders open, and those beside weights.

    Those of weights are hashed as their tensors are read.
    """
    shards = subject.hf_files.shards if subject.is_hf else {}
    return {
        name: FileHash(
            subject.path / name, record.digest, min(shards[name].offsets.values(), default=0) if name in shards else 0
        )
        for name, record in subject.once(downloads).items()
        if name in (*shards, INDEX) or not is_weight(name)
    }


class _Hashed(HfCheckpoint):
    """An HF directory whose files are hashed as its tensors are read."""

    def __init__(self, files: HfFiles, hashes: Mapping[str, FileHash]) -> None:
        super().__init__(files.root, files.shards)
        self._hashes = hashes

    def read(self, names: Sequence[str], reader: Reader | None = None) -> dict[str, Tensor]:
        found = super().read(names, reader)
        for name, tensor in found.items():
            shard = self._shard_of[name]
            # What lies in the memory of a reader does not stay there.
            if reader is None and (hashed := self._hashes.get(shard.path.name)) is not None:
                hashed.add(shard.offsets[name], tensor)
        return found


def alternating(homes: Sequence[object], width: int) -> list[int]:
    """Numbers of `homes` in an order that goes through `width` of the homes at a time, each from its first to its last.

    A file is hashed from its beginning to its end, by one thread at a time.
    """
    queues: dict[object, deque[int]] = {}
    for number, home in enumerate(homes):
        queues.setdefault(home, deque()).append(number)
    waiting, order = list(queues.values()), []
    active = [waiting.pop(0) for _ in waiting[:width]]
    while active:
        order += [queue.popleft() for queue in active]
        if not all(active):
            active = [queue for queue in active if queue]
            active += [waiting.pop(0) for _ in waiting[: width - len(active)]]
    return order


def _pass(subject: Subject, stored: bool) -> Values:
    if subject.is_hf:
        refuse_foreign(subject.checkpoint.specs, subject.path)
        refuse_stated(subject.checkpoint.config, subject.path)
    hashes = {} if subject.options.ray is not None else subject.once(file_hashes)
    hashed = _Hashed(subject.hf_files, hashes) if hashes else None
    checkpoint, source = sides(subject, stored, hashed)
    specs, values = checkpoint.specs, Values()
    groups = list(common_groups(checkpoint, source))
    homes = [_file_of(checkpoint, names) if hashes else None for names in groups]
    order = alternating(homes, os.cpu_count() or 1)
    if source is not None:
        values.only_source = [name for name in source.specs if name not in specs]
        values.only_here = [name for name in specs if name not in source.specs]
    with (
        progress("reading values", sum(spec.nbytes for spec in specs.values())) as advance,
        _parts(subject, stored, checkpoint, source, [groups[number] for number in order]) as parts,
    ):
        found = []
        for part in parts:
            found.append(part)
            advance(sum(stats.nbytes for stats in part.stats.values()))
    # A task on a cluster looks at several groups, which come in their order; only threads hash, in another.
    if hashes:
        found = [part for _, part in sorted(zip(order, found, strict=True), key=itemgetter(0))]
    for part in found:
        values.add(part)
    return values


def _file_of(checkpoint: Checkpoint, names: Sequence[str]) -> object:
    return next((one.path for one in byte_ranges_of(checkpoint, names)), None)


@contextmanager
def _parts(
    subject: Subject, stored: bool, checkpoint: Checkpoint, source: Checkpoint | None, groups: Groups
) -> Iterator[Iterator[Values]]:
    """What is found of the groups, in their order: by threads, or by tasks on a Ray cluster."""
    if subject.options.ray is not None:
        with closing(parts_on_ray(subject, stored, checkpoint, groups)) as parts:
            yield parts
        return
    largest = max((sum(checkpoint.specs[name].nbytes for name in names) for names in groups), default=0)
    with threads(largest) as pool:
        yield pool.map(partial(look, checkpoint, source), groups)


@dataclass(frozen=True)
class TaskInput:
    """What every task of a pass is given; paths are those of `Subject`."""

    path: Path
    source_path: Path | None
    hf_path: Path | None
    stored: bool  # whether names are those on disk
    files: str  # fingerprint of both sides, which the task's node must see too


def parts_on_ray(
    subject: Subject, stored: bool, checkpoint: Checkpoint, groups: Groups
) -> Generator[Values, None, None]:
    """What each task found, in the order of `groups`. Raises CkptkitError as `outcomes`, and where nodes differ."""
    # Workers run in another directory.
    source, hf = (path and path.absolute() for path in (subject.source_path, subject.hf_path))
    task = TaskInput(subject.path.absolute(), source, hf, stored, _files(subject))
    sizes = {names: sum(checkpoint.specs[name].nbytes for name in names) for names in groups}
    with connected(subject.options.ray or "auto") as ray:
        pieces = [[name for names in piece for name in names] for piece in pieces_of(sizes, cpus(ray))]
        early: dict[int, Values] = {}
        following = 0
        for index, part in outcomes(ray, look_at, task, pieces):
            early[index] = part
            while following in early:
                yield early.pop(following)
                following += 1


def look_at(task: TaskInput, names: Sequence[str]) -> Values:
    """Looks at whole groups, on this node. Raises CkptkitError when it does not see the coordinator's files."""
    checkpoint, source, groups = _open_sides(task)
    wanted, found = set(names), Values()
    for group in groups:
        if group[0] in wanted:
            found.add(look(checkpoint, source, group))
    return found


@lru_cache(maxsize=1)
def _open_sides(task: TaskInput) -> tuple[Checkpoint, Checkpoint | None, Groups]:
    """Both sides, opened once a process."""
    if _files(task) != task.files:
        also = f" or {task.source_path}" if task.source_path else ""
        raise CkptkitError(
            f"node {socket.gethostname()} sees other files at {task.path}{also} than the coordinator"
            " (names, sizes or times differ)",
            "name paths on a file system that all nodes share, or copy with times (rsync -a)",
        )
    checkpoint, source = sides(Subject(task.path, task.source_path, task.hf_path), task.stored)
    return checkpoint, source, list(common_groups(checkpoint, source))


def _files(sides: Subject | TaskInput) -> str:
    return fingerprint(map(weights_at, filter(None, (sides.path, sides.source_path, sides.hf_path))), is_own)


@contextmanager
def threads(largest: int) -> Iterator[Executor]:
    """A thread a core, memory permitting, each with one thread of torch's: more would only be in their way.

    `largest`: bytes of the largest group of tensors on one side.
    """
    import torch

    before = torch.get_num_threads()
    try:
        # Both sides and what is computed from them are in memory at a time, for every thread.
        workers = max(1, min(os.cpu_count() or 1, _MEMORY // (3 * largest or 1)))
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)
