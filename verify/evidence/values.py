"""Measures what a group of tensors holds, and how it differs from the source: digests, extremes and differences."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import View
from ckptkit.core.specs import TensorSpec, ranges
from ckptkit.formats.detect import locate
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from converters.experts import is_fused, unfuse
from converters.megatron.legacy import LegacyCheckpoint
from verify.evidence.extremes import Extremes, as_integers, digest_of, extremes, same_bytes
from verify.evidence.plain import as_release
from verify.evidence.subject import Subject

if TYPE_CHECKING:
    from torch import Tensor

Groups = Sequence[tuple[str, ...]]

_PIECE = 1 << 24  # elements of a tensor that are compared at a time
_RUNS = 6  # runs of rows that are named one by one
_SHORT = 32  # elements of a row
_NEXT_TO_ZERO = 0.1  # of the length of the usual row
_COUNTED = 1 << 16  # elements up to which distinct values are counted: router biases, not matrices


@dataclass(frozen=True)
class Difference:
    """How a tensor differs from its source."""

    source: TensorSpec
    actual: TensorSpec
    unequal: int  # elements, after the source is cast
    largest: float  # the largest gap
    distinct_source: int  # distinct values, of small tensors only
    distinct_actual: int
    rows: str = ""  # rows with unequal elements, `rows 3..5` or `row 7`; empty where that is every row, or none
    shift: int = 0  # 1 or -1 where every element of a vector is that much more than the source's, rounded
    unlike: int = 0  # rows of a matrix of floats that are further from the source's than training moves them
    unlike_rows: str = ""  # the same, as `rows`


@dataclass
class Values:
    """The outcome of the pass. With a source, names are HF names with one tensor an expert, else those on disk."""

    stats: dict[str, Extremes] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)  # and why
    differences: dict[str, Difference] = field(default_factory=dict)
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
    values.differences[name] = difference(name, tensor, origin)


def difference(name: str, tensor: Tensor, origin: Tensor) -> Difference:
    """How `tensor` differs from `origin`, which is cast to its dtype first: rounding alone is not a difference."""
    source, actual = (TensorSpec.of(name, one) for one in (origin, tensor))
    if source.shape != actual.shape:
        return Difference(source, actual, tensor.numel(), float("nan"), 0, 0)
    unequal, largest, width = 0, 0.0, tensor.numel() // len(tensor) if tensor.dim() > 1 and len(tensor) else 0
    rows: set[int] = set()
    for at, (found, true) in enumerate(zip(_pieces(tensor), _pieces(origin), strict=True)):
        wrong = as_integers(true.to(found.dtype)) != as_integers(found)
        unequal += int(wrong.sum())
        rows |= set((wrong.nonzero().flatten().add(at * _PIECE) // width).tolist()) if width else set()
        largest = max(largest, float((found.double() - true.double()).abs().max()))
    few = origin.numel() <= _COUNTED
    distinct = [len(set(one.reshape(-1).tolist())) if few else 0 for one in (origin, tensor)]
    unlike = _unlike(tensor, origin)
    named, unlike_named = (rows_named(some) if 0 < len(some) < len(tensor) else "" for some in (rows, unlike))
    shift = _shift(tensor, origin)
    numbers = source, actual, unequal, largest, distinct[0], distinct[1]
    return Difference(*numbers, named, shift, len(unlike), unlike_named)


def _shift(tensor: Tensor, origin: Tensor) -> int:
    """1 or -1 where that was added to each element of a vector, as of norms that multiply by 1 + w; else 0."""
    if tensor.dim() != 1 or not tensor.is_floating_point():
        return 0
    return next((by for by in (1, -1) if bool(((origin.float() + by).to(tensor.dtype) == tensor).all())), 0)


def _unlike(tensor: Tensor, origin: Tensor) -> Collection[int]:
    """The rows that are further from the source's row than zero is, but those that are short, or next to zero there.

    Training moves a row by less than its length, and one that is next to zero anywhere.
    """
    import torch

    if not (tensor.dim() > 1 and tensor.numel() and tensor.is_floating_point() and origin.is_floating_point()):
        return ()
    here, there = (one.reshape(len(one), -1) for one in (tensor, origin))
    if (width := here.shape[1]) < _SHORT:
        return ()
    step, sums = max(1, _PIECE // width), []
    for start in range(0, len(here), step):
        one, other = (rows[start : start + step].float() for rows in (here, there))
        sums.append(torch.stack([(one - other).norm(dim=1), other.norm(dim=1)]))
    distance, length = torch.cat(sums, dim=1)
    is_unlike = (distance > length) & (length > _NEXT_TO_ZERO * length.median())
    return [int(row) for row in is_unlike.nonzero().flatten()]


def rows_named(rows: Collection[int]) -> str:
    """`rows 3..5,9`, or `row 7`; of many runs the first alone, with the number of rows."""
    text = ranges(rows).strip("{}")
    if text.count(",") >= _RUNS:
        return f"rows {text.partition(',')[0]} and others, {len(rows)} in all"
    return f"row{'s' * (len(rows) > 1)} {text}"


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Flat pieces, small enough that float64 copies of them do not matter."""
    flat = tensor.contiguous().reshape(-1)
    return [flat[start : start + _PIECE] for start in range(0, flat.numel(), _PIECE)]
