"""The pass over all tensors of both sides: measures each, and compares it with the source's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import View
from ckptkit.formats.detect import locate
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from converters.experts import is_fused, unfuse
from converters.megatron.legacy import LegacyCheckpoint
from verify.evidence.compare import TensorDiff, compare
from verify.evidence.extremes import Extremes, digest_of, extremes, same_bytes
from verify.evidence.plain import as_release
from verify.evidence.subject import Subject

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


def common_groups(left: Checkpoint, right: Checkpoint | None) -> Iterator[tuple[str, ...]]:
    """Groups of `left`, joined where `right` must be read together, in the order of `left`."""
    if right is None:
        yield from left.groups
        return
    group_of = {name: index for index, names in enumerate(right.groups) for name in names}
    joined: dict[int, int] = {}
    merged: list[list[str]] = []
    for names in left.groups:
        touched = {group_of[name] for name in names if name in group_of}
        homes = sorted({joined[index] for index in touched if index in joined})
        home = homes[0] if homes else len(merged)
        if not homes:
            merged.append([])
        for other in homes[1:]:
            merged[home] += merged[other]
            merged[other] = []
            joined = {index: home if place == other else place for index, place in joined.items()}
        merged[home] += names
        joined.update(dict.fromkeys(touched, home))
    yield from (tuple(names) for names in merged if names)


def look(checkpoint: Checkpoint, source: Checkpoint | None, names: Sequence[str]) -> Values:
    """Measures these tensors, which are read together."""
    values = Values()
    found = _read(checkpoint, names, values)
    origin = source.read([name for name in found if name in source.specs]) if source is not None else {}
    for name, tensor in found.items():
        values.stats[name] = extremes(tensor)
        if name in origin:
            _compare(name, tensor, origin[name], values)
    return values


def _read(checkpoint: Checkpoint, names: Sequence[str], values: Values) -> Mapping[str, Tensor]:
    try:
        return checkpoint.read(names)
    except CkptkitError as error:
        if len(names) > 1:
            return {key: tensor for name in names for key, tensor in _read(checkpoint, [name], values).items()}
        values.unreadable[names[0]] = error.message
        return {}


def _compare(name: str, tensor: Tensor, origin: Tensor, values: Values) -> None:
    stats = values.stats[name]
    values.compared[name] = stats.nbytes
    if same_bytes(tensor, origin):
        values.source_names[stats.digest] = name
        return
    digest = digest_of(origin)
    values.source_names[digest] = name
    # The source is cast first: rounding alone is not a difference.
    values.differences[name] = compare(name, tensor, origin, tensor.dtype)
