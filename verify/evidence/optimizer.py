"""Reads the optimizer state of a Megatron checkpoint once, tensor by tensor, and compares master weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ckptkit.core.dtypes import ITEMSIZE
from ckptkit.core.errors import CkptkitError
from ckptkit.core.progress import progress
from ckptkit.formats.torch_dist.reader import Chunk, Part, StoredTensor, parts_of
from ckptkit.formats.torch_dist.training_state import (
    MASTERS,
    Bucket,
    OptimizerState,
    is_padding,
    optimizer_state,
    unflatten,
)
from ckptkit.verify.core.subject import Subject, once
from ckptkit.verify.evidence.both_sides import threads
from ckptkit.verify.evidence.extremes import as_integers, digest_of, extremes, same_bytes
from ckptkit.verify.evidence.reading import read_values

if TYPE_CHECKING:
    from torch import Tensor

_PIECE = 1 << 22  # elements that are looked at at a time
_ROUNDED = ("bfloat16", "float16")  # of weights, whose master weights are float32


@once
def state_of(subject: Subject) -> OptimizerState:
    """The optimizer state beside the weights. Raises CkptkitError where `.metadata` cannot be read."""
    return optimizer_state(subject.megatron_files.metadata)


@dataclass(frozen=True)
class StateStats:
    """What one tensor of state holds, or a bucket."""

    kind: str
    nbytes: int
    finite: bool
    low: float
    high: float

    def joined(self, other: StateStats) -> StateStats:
        """The same of both."""
        low, high = min(self.low, other.low), max(self.high, other.high)
        return StateStats(self.kind, self.nbytes + other.nbytes, self.finite and other.finite, low, high)


@dataclass
class OptimizerValues:
    """The outcome of the pass, by the name of each tensor of state: `optimizer.state.exp_avg.NAME`."""

    stats: dict[str, StateStats] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)  # and why
    compared: dict[str, tuple[int, int]] = field(default_factory=dict)  # masters: elements unlike the weight's, of all
    # Of buckets, which have no names, by dtype of the weights: how often numbers occur in weights, and nearest to
    # masters (to the even and to the larger one where two are as near).
    weights: dict[str, Tensor] = field(default_factory=dict)
    masters: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add(self, part: OptimizerValues) -> None:
        """Takes in what was found of a tensor, or of a part of a bucket."""
        for name, found in part.stats.items():
            self.stats[name] = self.stats[name].joined(found) if name in self.stats else found
        self.unreadable |= part.unreadable
        self.compared |= part.compared
        for dtype, counts in part.weights.items():
            self.weights[dtype] += counts
        for dtype, pair in part.masters.items():
            for mine, its in zip(self.masters[dtype], pair, strict=True):
                mine += its


@dataclass(frozen=True)
class _Task:
    """A tensor of state or a part of a bucket, or a weight beside one; `look` raises CkptkitError as reading does."""

    name: str
    nbytes: int
    look: Callable[[], OptimizerValues]

    def run(self) -> OptimizerValues:
        try:
            return self.look()
        except CkptkitError as error:
            return OptimizerValues(unreadable={self.name: error.message})


@once
def optimizer_values(subject: Subject) -> OptimizerValues:
    """Reads everything once. The weights beside master weights are read only where their digests are not known yet."""
    import torch

    state, values = state_of(subject), OptimizerValues()
    known = {name: one.digest for name, one in read_values(subject).stats.items()}
    tasks = [*_by_weight(state, known), *_by_bucket(state)]
    for dtype in _rounded(state.buckets):
        counts = [torch.zeros(1 << 16, dtype=torch.int64) for _ in range(3)]
        values.weights[dtype], values.masters[dtype] = counts[0], (counts[1], counts[2])
    total, largest = sum(task.nbytes for task in tasks), max((task.nbytes for task in tasks), default=0)
    with progress("reading optimizer state", total) as advance, threads(largest) as pool:
        for task, part in zip(tasks, pool.map(_Task.run, tasks), strict=True):
            values.add(part)
            advance(task.nbytes)
    return values


def _by_weight(state: OptimizerState, known: Mapping[str, bytes]) -> Iterator[_Task]:
    """A task for each tensor of state."""
    for key, kinds in state.by_weight.items():
        weights = dict(parts_of(key, state.weights[key]))
        for kind, stored in kinds.items():
            prefix = stored.key.removesuffix(key)
            for name, part in parts_of(key, stored):
                is_master = kind in MASTERS and stored.dtype == "float32" and state.weights[key].dtype in _ROUNDED
                look = partial(
                    _look, prefix + name, kind, part, weights.get(name) if is_master else None, known.get(name)
                )
                yield _Task(prefix + name, sum(_bytes(chunk, stored.dtype) for chunk in part.chunks), look)


def _look(name: str, kind: str, part: Part, weight: Part | None, digest: bytes | None) -> OptimizerValues:
    tensor = part.read(None)
    found = OptimizerValues({name: _measured(kind, tensor)})
    if weight is not None:
        tensor = tensor if tensor.shape == weight.shape else unflatten(tensor, weight.shape)
        found.compared[name] = (_unlike(tensor, weight, digest), tensor.numel())
    return found


def _by_bucket(state: OptimizerState) -> Iterator[_Task]:
    """A task for each chunk of a bucket; where master weights are among them, for each weight too."""
    for bucket in state.buckets:
        for kind, stored in bucket.kinds.items():
            for chunk in stored.chunks:
                look = partial(_look_at_chunk, bucket, kind, stored, chunk)
                yield _Task(stored.key, _bytes(chunk, stored.dtype), look)
    rounded = _rounded(state.buckets)
    for key, stored in state.weights.items():
        if stored.dtype in rounded:
            for _, part in parts_of(key, stored):
                nbytes = sum(_bytes(chunk, stored.dtype) for chunk in part.chunks)
                yield _Task(key, nbytes, partial(_look_at_weight, part))


def _rounded(buckets: Sequence[Bucket]) -> set[str]:
    """Dtypes of weights whose float32 master weights are in buckets."""
    return {
        bucket.dtype
        for bucket in buckets
        for kind, stored in bucket.kinds.items()
        if kind in MASTERS and bucket.dtype in _ROUNDED and stored.dtype == "float32"
    }


def _bytes(chunk: Chunk, dtype: str) -> int:
    return math.prod(chunk.sizes) * ITEMSIZE[dtype]


def _look_at_chunk(bucket: Bucket, kind: str, stored: StoredTensor, chunk: Chunk) -> OptimizerValues:
    import torch

    tensor, found = chunk.blob.tensor(stored.dtype, chunk.sizes), OptimizerValues()
    if len(chunk.offsets) != 1 or not is_padding(chunk.offsets[0], tensor.numel()):
        found.stats[stored.key] = _measured(kind, tensor)
    if kind in MASTERS and bucket.dtype in _ROUNDED and stored.dtype == "float32":
        even, up = torch.zeros(2, 1 << 16, dtype=torch.int64)
        for piece in torch.split(tensor, _PIECE):
            nearest = as_integers(piece.to(getattr(torch, bucket.dtype)))  # of two as near the even one
            even += _occurrences(nearest)
            up += _occurrences(_nearest_up(piece) if bucket.dtype == "bfloat16" else nearest)
        found.masters[bucket.dtype] = even, up
    return found


def _look_at_weight(part: Part) -> OptimizerValues:
    import torch

    pieces = torch.split(part.read(None).reshape(-1), _PIECE)
    counts = torch.stack([_occurrences(as_integers(piece)) for piece in pieces]).sum(dim=0)
    return OptimizerValues(weights={part.stored.dtype: counts})


def _occurrences(bits: Tensor) -> Tensor:
    """How often each number of a 16-bit dtype occurs in a tensor of int16, the bits of numbers."""
    import torch

    return torch.bincount(bits.reshape(-1).to(torch.int64) & 0xFFFF, minlength=1 << 16)


def _measured(kind: str, tensor: Tensor) -> StateStats:
    found = extremes(tensor.reshape(-1))
    return StateStats(kind, found.nbytes, found.finite, found.low, found.high)


def _nearest_up(master: Tensor) -> Tensor:
    """The bits of the nearest bfloat16 numbers; of two as near the larger one.

    So does Transformer Engine's optimizer where it keeps of a master weight only what the weight lacks
    (`store_param_remainders`).
    """
    import torch

    return ((as_integers(master) + 0x8000) >> 16).to(torch.int16)


def _unlike(master: Tensor, part: Part, digest: bytes | None) -> int:
    """How many elements of a weight are not the nearest to their master weights. `digest`: of the weight, if known."""
    import torch

    dtype = part.stored.dtype
    rounded = master.to(getattr(torch, dtype)).contiguous()
    if digest is not None and digest_of(rounded) == digest:
        return 0
    weight = part.read(None).contiguous()
    if same_bytes(rounded, weight):
        return 0
    wrong = as_integers(rounded) != as_integers(weight)
    if dtype == "bfloat16":
        wrong &= _nearest_up(master) != as_integers(weight)
    return int(wrong.sum())


def count_without_master(values: OptimizerValues, dtype: str) -> int:
    """How many weights of this dtype are nearest to no master weight of a bucket, each counted once.

    As many as there are fewer masters than weights do not count: the run does not train those.
    """
    weights = values.weights[dtype]
    fewer = max(0, int(weights.sum() - values.masters[dtype][0].sum()))
    missing = min(int((weights - masters).clamp(min=0).sum()) for masters in values.masters[dtype])
    return missing if missing > fewer else 0
