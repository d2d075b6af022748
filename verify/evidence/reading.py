"""Reads all the bytes of a checkpoint and its source in one pass, with few tensors in memory: threads, or Ray.

The same pass hashes whole files, where the model hub's client has recorded the hash of what it downloaded.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from ckptkit.converters.experts import is_fused, unfuse
from ckptkit.converters.foreign import refuse_declared_format, refuse_foreign
from ckptkit.converters.megatron.legacy import LegacyCheckpoint
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.extents import Reader, byte_ranges_of
from ckptkit.core.plan import View
from ckptkit.core.progress import progress
from ckptkit.formats.detect import locate
from ckptkit.formats.hf.hub_cache import Download, downloads_in
from ckptkit.formats.hf.reader import INDEX, HfCheckpoint
from ckptkit.formats.hf.side_files import is_own, is_weight, weights_at
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.storage.file_hash import FileHash
from ckptkit.storage.fingerprint import fingerprint
from ckptkit.transfer.ray import cpus, outcomes, pieces_of, ray_cluster
from ckptkit.verify.core.subject import Subject, once
from ckptkit.verify.evidence.both_sides import SPARE, BothSides, common_groups, threads
from ckptkit.verify.evidence.compare import TensorDiff, compare
from ckptkit.verify.evidence.extremes import Extremes, digest_of
from ckptkit.verify.evidence.files import HfFiles
from ckptkit.verify.evidence.plain import as_release

if TYPE_CHECKING:
    from torch import Tensor

Groups = Sequence[tuple[str, ...]]


@dataclass
class Values:
    """The outcome of the pass. With a source, names are HF names with one tensor an expert, else those on disk."""

    stats: dict[str, Extremes] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)  # and why
    differences: dict[str, TensorDiff] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)  # bytes of each tensor that the source has too
    only_source: list[str] = field(default_factory=list)
    only_here: list[str] = field(default_factory=list)
    source_names: dict[bytes, str] = field(default_factory=dict)  # by digest

    def add(self, part: Values) -> None:
        """Takes in what was found of other tensors."""
        self.stats |= part.stats
        self.unreadable |= part.unreadable
        self.differences |= part.differences
        self.compared |= part.compared
        self.source_names |= part.source_names


def as_hf_view(checkpoint: Checkpoint, where: Path, release: Collection[str] = ()) -> Checkpoint:
    """The checkpoint as a view under HF names, with one tensor an expert and the tensors that are only carried.

    `release` are the names to compare with: tensors that it repeats are repeated. Raises CkptkitError where the config
    does not fit.
    """
    if isinstance(checkpoint, (TorchDistCheckpoint, LegacyCheckpoint)):
        return as_release(checkpoint, locate(where).root, release, fused=False)
    return (
        View(checkpoint, unfuse(checkpoint.specs, checkpoint.config, str(where)))
        if is_fused(checkpoint.specs)
        else checkpoint
    )


def sides(subject: Subject, stored: bool, opened: Checkpoint | None = None) -> tuple[Checkpoint, Checkpoint | None]:
    """The checkpoint and its source with HF names; `stored`: the checkpoint alone, with its names on disk.

    opened: the checkpoint, where it was opened for the purpose.
    """
    checkpoint, source = opened or subject.checkpoint, None if stored else subject.source
    if source is None:
        return (checkpoint if stored or subject.is_megatron else as_hf_view(checkpoint, subject.path)), None
    return as_hf_view(checkpoint, subject.path, source.specs), source_as_hf(subject, checkpoint.specs)


def source_as_hf(subject: Subject, names: Collection[str] = ()) -> Checkpoint:
    """The source as `as_hf_view` shows it. Raises ValueError where there is none."""
    if subject.source is None:
        raise ValueError("there is no source")
    return as_hf_view(subject.source, subject.source_path or subject.path, names)


def look(sides: BothSides, names: Sequence[str]) -> Values:
    """Measures these tensors, which are read together, and compares them with the source's."""
    values = Values()
    for both in sides.read([name for name in names if name in sides.a.specs], values.unreadable):
        stats = values.stats[both.name] = both.stats
        if sides.b is None or both.name not in sides.b.specs:
            continue
        values.compared[both.name] = stats.nbytes
        if both.is_equal:
            values.source_names[stats.digest] = both.name
        elif both.a is not None and both.b is not None:
            values.source_names[digest_of(both.b)] = both.name
            # The source is cast first: rounding alone is not a difference.
            values.differences[both.name] = compare(both.name, both.a, both.b, both.a.dtype)
    return values


@once
def read_values(subject: Subject) -> Values:
    """Reads everything once, group by group. With a source, both sides are seen as HF and compared as they come by."""
    return _pass(subject, stored=False)


def stored_values(subject: Subject) -> Values:
    """The same of every tensor under its name on disk: from the one pass where that is how it names them."""
    fused = subject.is_hf and is_fused(subject.checkpoint.specs)
    if not fused and (subject.is_hf or subject.source_path is None):
        return read_values(subject)
    return _pass(subject, stored=True)


@once
def downloads(subject: Subject) -> Mapping[str, Download]:
    """What the model hub's client has recorded of the files of an HF directory, by relative name."""
    return downloads_in(subject.path) if subject.is_hf else {}


@once
def file_hashes(subject: Subject) -> Mapping[str, FileHash]:
    """The files to compare with such a record: those of weights that loaders open, and those beside weights.

    Those of weights are hashed as their tensors are read.
    """
    shards = subject.hf_files.shards if subject.is_hf else {}
    return {
        name: FileHash(
            subject.path / name, record.digest, min(shards[name].offsets.values(), default=0) if name in shards else 0
        )
        for name, record in downloads(subject).items()
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
            if (hashed := self._hashes.get(shard.path.name)) is not None:
                # What lies in the memory of a reader does not stay there.
                hashed.add(shard.offsets[name], tensor if reader is None else tensor.clone())
        return found

    def is_streamable(self, name: str) -> bool:
        """Pieces of a tensor are not hashed."""
        return self._shard_of[name].path.name not in self._hashes and super().is_streamable(name)


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
        refuse_declared_format(subject.checkpoint.config, subject.path)
    hashes = {} if subject.options.ray is not None else file_hashes(subject)
    hashed = _Hashed(subject.hf_files, hashes) if hashes else None
    checkpoint, source = sides(subject, stored, hashed)
    specs, values = checkpoint.specs, Values()
    groups = list(common_groups(checkpoint, source))
    homes = [
        next((one.path for one in byte_ranges_of(checkpoint, names)), None) if hashes else None for names in groups
    ]
    order = alternating(homes, os.cpu_count() or 1)
    if source is not None:
        values.only_source = [name for name in source.specs if name not in specs]
        values.only_here = [name for name in specs if name not in source.specs]
    with (
        progress("reading values", sum(spec.nbytes for spec in specs.values())) as advance,
        _parts(subject, stored, BothSides(checkpoint, source), [groups[number] for number in order]) as parts,
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


@contextmanager
def _parts(subject: Subject, stored: bool, sides: BothSides, groups: Groups) -> Iterator[Iterator[Values]]:
    """What is found of the groups, in their order: by threads, or by tasks on a Ray cluster."""
    if subject.options.ray is not None:
        with closing(parts_on_ray(subject, stored, sides.a, groups)) as parts:
            yield parts
        return
    with threads(sides.largest(groups), SPARE) as pool:
        yield pool.map(partial(look, sides), groups)


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
    with ray_cluster(subject.options.ray or "auto") as ray:
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
    both, groups = _open_sides(task)
    wanted, found = set(names), Values()
    for group in groups:
        if group[0] in wanted:
            found.add(look(both, group))
    return found


@lru_cache(maxsize=1)
def _open_sides(task: TaskInput) -> tuple[BothSides, Groups]:
    """Both sides, opened once a process."""
    if _files(task) != task.files:
        also = f" or {task.source_path}" if task.source_path else ""
        raise CkptkitError(
            f"node {socket.gethostname()} sees other files at {task.path}{also} than the coordinator"
            " (names, sizes or times differ)",
            "name paths on a file system that all nodes share, or copy with times (rsync -a)",
        )
    checkpoint, source = sides(Subject(task.path, task.source_path, task.hf_path), task.stored)
    return BothSides(checkpoint, source), list(common_groups(checkpoint, source))


def _files(sides: Subject | TaskInput) -> str:
    return fingerprint(map(weights_at, filter(None, (sides.path, sides.source_path, sides.hf_path))), is_own)
