"""Reads a checkpoint and its source in one pass, by threads or on Ray, and hashes files with a recorded hash."""

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
    unreadable: dict[str, str] = field(default_factory=dict)  # with the reason
    differences: dict[str, TensorDiff] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)  # bytes of each tensor that the source also has
    only_source: list[str] = field(default_factory=list)
    only_here: list[str] = field(default_factory=list)
    source_names: dict[bytes, str] = field(default_factory=dict)  # by digest

    def add(self, part: Values) -> None:
        """Merges the outcome for other tensors."""
        self.stats |= part.stats
        self.unreadable |= part.unreadable
        self.differences |= part.differences
        self.compared |= part.compared
        self.source_names |= part.source_names


def as_hf_view(checkpoint: Checkpoint, where: Path, release: Collection[str] = ()) -> Checkpoint:
    """The checkpoint under HF names, with one tensor an expert and repetitions of `release`. Raises CkptkitError."""
    if isinstance(checkpoint, (TorchDistCheckpoint, LegacyCheckpoint)):
        return as_release(checkpoint, locate(where).root, release, fused=False)
    if is_fused(checkpoint.specs):
        return View(checkpoint, unfuse(checkpoint.specs, checkpoint.config, str(where)))
    return checkpoint


def sides(subject: Subject, stored: bool, opened: Checkpoint | None = None) -> tuple[Checkpoint, Checkpoint | None]:
    """The checkpoint (or `opened`) and its source under HF names; if `stored`, only the checkpoint as on disk."""
    checkpoint, source = opened or subject.checkpoint, None if stored else subject.source
    if source is None:
        return (checkpoint if stored or subject.kind == "megatron" else as_hf_view(checkpoint, subject.path)), None
    return as_hf_view(checkpoint, subject.path, source.specs), source_as_hf(subject, checkpoint.specs)


def source_as_hf(subject: Subject, names: Collection[str] = ()) -> Checkpoint:
    """The source under HF names, as `as_hf_view`. Raises ValueError without a source."""
    if subject.source is None:
        raise ValueError("--source was not given")
    return as_hf_view(subject.source, subject.source_path or subject.path, names)


def compare_group(sides: BothSides, names: Sequence[str]) -> Values:
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
            # The source is cast first: rounding is not a difference.
            values.differences[both.name] = compare(both.name, both.a, both.b, both.a.dtype)
    return values


@once
def read_values(subject: Subject) -> Values:
    """Reads everything once. With a source, both sides are read under HF names and compared."""
    return _pass(subject, stored=False)


def stored_values(subject: Subject) -> Values:
    """As `read_values`, but under names on disk and without the source. Does not read again if the names agree."""
    fused = subject.kind == "hf" and is_fused(subject.checkpoint.specs)
    if not fused and (subject.kind == "hf" or subject.source_path is None):
        return read_values(subject)
    return _pass(subject, stored=True)


@once
def downloads(subject: Subject) -> Mapping[str, Download]:
    """The records of the model hub's client for the files of an HF directory, by relative name."""
    return downloads_in(subject.path) if subject.kind == "hf" else {}


@once
def file_hashes(subject: Subject) -> Mapping[str, FileHash]:
    """The recorded weight files that loaders open, hashed as tensors are read, and the other recorded files."""
    shards = subject.hf_files.shards if subject.kind == "hf" else {}
    begins = {name: min(shard.offsets.values(), default=0) for name, shard in shards.items()}
    return {
        name: FileHash(subject.path / name, record.digest, begins.get(name, 0))
        for name, record in downloads(subject).items()
        if name in (*shards, INDEX) or not is_weight(name)
    }


class _Hashed(HfCheckpoint):
    def __init__(self, files: HfFiles, hashes: Mapping[str, FileHash]) -> None:
        super().__init__(files.root, files.shards)
        self._hashes = hashes

    def read(self, names: Sequence[str], reader: Reader | None = None) -> dict[str, Tensor]:
        tensors = super().read(names, reader)
        for name, tensor in tensors.items():
            shard = self._shard_of[name]
            if (hashed := self._hashes.get(shard.path.name)) is not None:
                # A reader reuses its memory.
                hashed.add(shard.offsets[name], tensor if reader is None else tensor.clone())
        return tensors

    def is_streamable(self, name: str) -> bool:
        """Pieces of a tensor are not hashed."""
        return self._shard_of[name].path.name not in self._hashes and super().is_streamable(name)


def alternating(homes: Sequence[object], width: int) -> list[int]:
    """Orders the indices of `homes` so that `width` homes alternate, each from its first index to its last."""
    queues: dict[object, deque[int]] = {}  # one thread at a time hashes a file, from its beginning to its end
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
    if subject.kind == "hf":
        refuse_foreign(subject.checkpoint.specs, subject.path)
        refuse_declared_format(subject.checkpoint.config, subject.path)
    hashes = {} if subject.options.ray is not None else file_hashes(subject)
    checkpoint, source = sides(subject, stored, _Hashed(subject.hf_files, hashes) if hashes else None)
    specs, values = checkpoint.specs, Values()
    groups = list(common_groups(checkpoint, source))
    ranges = (byte_ranges_of(checkpoint, names) if hashes else () for names in groups)
    order = alternating([next((one.path for one in some), None) for some in ranges], os.cpu_count() or 1)
    if source is not None:
        values.only_source = [name for name in source.specs if name not in specs]
        values.only_here = [name for name in specs if name not in source.specs]
    done = []
    with (
        progress("reading values", sum(spec.nbytes for spec in specs.values())) as advance,
        _parts(subject, stored, BothSides(checkpoint, source), [groups[number] for number in order]) as parts,
    ):
        for part in parts:
            done.append(part)
            advance(sum(stats.nbytes for stats in part.stats.values()))
    # A task on a cluster compares several groups in order; only threads hash, in another order.
    if hashes:
        done = [part for _, part in sorted(zip(order, done, strict=True), key=itemgetter(0))]
    for part in done:
        values.add(part)
    return values


@contextmanager
def _parts(subject: Subject, stored: bool, sides: BothSides, groups: Groups) -> Iterator[Iterator[Values]]:
    if subject.options.ray is not None:
        with closing(parts_on_ray(subject, stored, sides.a, groups)) as parts:
            yield parts
        return
    with threads(sides.largest(groups), SPARE) as pool:
        yield pool.map(partial(compare_group, sides), groups)


@dataclass(frozen=True)
class TaskInput:
    """The input of every task of a pass; paths are those of `Subject`."""

    path: Path
    source_path: Path | None
    hf_path: Path | None
    stored: bool  # whether names are those on disk
    files: str  # fingerprint of both sides on the coordinator


def parts_on_ray(
    subject: Subject, stored: bool, checkpoint: Checkpoint, groups: Groups
) -> Generator[Values, None, None]:
    """The outcome of each task, in the order of `groups`. Raises CkptkitError as `outcomes`, and if nodes differ."""
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
    """Compares complete groups on this node. Raises CkptkitError if it does not see the coordinator's files."""
    both, groups = _open_sides(task)
    requested, values = set(names), Values()
    for group in groups:
        if group[0] in requested:
            values.add(compare_group(both, group))
    return values


@lru_cache(maxsize=1)
def _open_sides(task: TaskInput) -> tuple[BothSides, Groups]:
    if _files(task) != task.files:
        paths = f"{task.path} or {task.source_path}" if task.source_path else task.path
        message = f"node {socket.gethostname()} sees other files at {paths} than the coordinator"
        hint = "pass paths on a file system that all nodes share, or copy files with their times (rsync -a)"
        raise CkptkitError(f"{message} (names, sizes or times differ)", hint)
    checkpoint, source = sides(Subject(task.path, task.source_path, task.hf_path), task.stored)
    return BothSides(checkpoint, source), list(common_groups(checkpoint, source))


def _files(sides: Subject | TaskInput) -> str:
    return fingerprint(map(weights_at, filter(None, (sides.path, sides.source_path, sides.hf_path))), is_own)
