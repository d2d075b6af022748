"""Reads the optimizer tensors of a Megatron checkpoint once, and compares master weights with weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ckptkit.core.dtypes import ITEMSIZE
from ckptkit.core.errors import CkptkitError
from ckptkit.core.progress import progress
from ckptkit.formats.torch_dist import training_state
from ckptkit.formats.torch_dist.reader import Chunk, Part, StoredTensor, parts_of
from ckptkit.verify.core.subject import Subject, once
from ckptkit.verify.evidence.both_sides import threads
from ckptkit.verify.evidence.extremes import as_integers, digest_of, extremes, same_bytes
from ckptkit.verify.evidence.reading import read_values

if TYPE_CHECKING:
    from torch import Tensor

_PIECE = 1 << 22  # elements that are converted at once
_ROUNDED = ("bfloat16", "float16")  # dtypes of weights with float32 master weights


@once
def state_of(subject: Subject) -> training_state.OptimizerState:
    """The optimizer tensors of the checkpoint. Raises CkptkitError if `.metadata` cannot be read."""
    return training_state.optimizer_state(subject.megatron_files.metadata)


@dataclass(frozen=True)
class StateStats:
    """The extremes of one optimizer tensor or bucket."""

    kind: str
    nbytes: int
    finite: bool
    low: float
    high: float

    def joined(self, other: StateStats) -> StateStats:
        """The extremes of both."""
        low, high = min(self.low, other.low), max(self.high, other.high)
        return StateStats(self.kind, self.nbytes + other.nbytes, self.finite and other.finite, low, high)


@dataclass
class OptimizerValues:
    """The outcome of the pass, by name of the optimizer tensor: `optimizer.state.exp_avg.NAME`."""

    stats: dict[str, StateStats] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)  # with the reason
    compared: dict[str, tuple[int, int]] = field(default_factory=dict)  # of masters: unequal elements, all elements
    # Buckets have no names. Occurrences of each number by dtype: in weights, in masters with ties to even, and ties up.
    weights: dict[str, Tensor] = field(default_factory=dict)
    masters: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add(self, part: OptimizerValues) -> None:
        """Merges the outcome for a tensor or a part of a bucket."""
        for name, stats in part.stats.items():
            self.stats[name] = self.stats[name].joined(stats) if name in self.stats else stats
        self.unreadable |= part.unreadable
        self.compared |= part.compared
        for dtype, counts in part.weights.items():
            self.weights[dtype] += counts
        for dtype, pair in part.masters.items():
            for total, counts in zip(self.masters[dtype], pair, strict=True):
                total += counts


@dataclass(frozen=True)
class _Task:
    name: str
    nbytes: int
    read: Callable[[], OptimizerValues]

    def run(self) -> OptimizerValues:
        try:
            return self.read()
        except CkptkitError as error:
            return OptimizerValues(unreadable={self.name: error.message})


@once
def optimizer_values(subject: Subject) -> OptimizerValues:
    """Reads everything once. Weights with master weights are read only if their digests are not known yet."""
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


def _by_weight(state: training_state.OptimizerState, known: Mapping[str, bytes]) -> Iterator[_Task]:
    for key, kinds in state.by_weight.items():
        weights = dict(parts_of(key, state.weights[key]))
        for kind, stored in kinds.items():
            is_master, prefix = _is_master(kind, stored, state.weights[key].dtype), stored.key.removesuffix(key)
            for name, part in parts_of(key, stored):
                weight = weights.get(name) if is_master else None
                read = partial(_read_state, prefix + name, kind, part, weight, known.get(name))
                yield _Task(prefix + name, _nbytes(part.chunks, stored.dtype), read)


def _is_master(kind: str, stored: StoredTensor, dtype: str) -> bool:
    """Whether a tensor contains float32 master weights of weights in `dtype`."""
    return kind in training_state.MASTERS and stored.dtype == "float32" and dtype in _ROUNDED


def _read_state(name: str, kind: str, part: Part, weight: Part | None, digest: bytes | None) -> OptimizerValues:
    tensor = part.read(None)
    values = OptimizerValues({name: _measured(kind, tensor)})
    if weight is not None:
        tensor = tensor if tensor.shape == weight.shape else training_state.unflatten(tensor, weight.shape)
        values.compared[name] = (_count_unequal(tensor, weight, digest), tensor.numel())
    return values


def _by_bucket(state: training_state.OptimizerState) -> Iterator[_Task]:
    for bucket in state.buckets:
        for kind, stored in bucket.kinds.items():
            for chunk in stored.chunks:
                read = partial(_read_chunk, bucket, kind, stored, chunk)
                yield _Task(stored.key, _nbytes([chunk], stored.dtype), read)
    rounded = _rounded(state.buckets)
    for key, stored in state.weights.items():
        for _, part in parts_of(key, stored) if stored.dtype in rounded else ():
            yield _Task(key, _nbytes(part.chunks, stored.dtype), partial(_read_weight, part))


def _rounded(buckets: Sequence[training_state.Bucket]) -> set[str]:
    """Dtypes of weights with float32 master weights in buckets."""
    kinds = ((one.dtype, kind, stored) for one in buckets for kind, stored in one.kinds.items())
    return {dtype for dtype, kind, stored in kinds if _is_master(kind, stored, dtype)}


def _nbytes(chunks: Sequence[Chunk], dtype: str) -> int:
    return sum(math.prod(chunk.sizes) for chunk in chunks) * ITEMSIZE[dtype]


def _read_chunk(bucket: training_state.Bucket, kind: str, stored: StoredTensor, chunk: Chunk) -> OptimizerValues:
    import torch

    tensor, values = chunk.blob.tensor(stored.dtype, chunk.sizes), OptimizerValues()
    if len(chunk.offsets) != 1 or not training_state.is_padding(chunk.offsets[0], tensor.numel()):
        values.stats[stored.key] = _measured(kind, tensor)
    if _is_master(kind, stored, bucket.dtype):
        even, up = torch.zeros(2, 1 << 16, dtype=torch.int64)
        for piece in torch.split(tensor, _PIECE):
            nearest = as_integers(piece.to(getattr(torch, bucket.dtype)))  # ties to even
            even += _occurrences(nearest)
            up += _occurrences(_nearest_up(piece) if bucket.dtype == "bfloat16" else nearest)
        values.masters[bucket.dtype] = even, up
    return values


def _read_weight(part: Part) -> OptimizerValues:
    import torch

    pieces = torch.split(part.read(None).reshape(-1), _PIECE)
    counts = torch.stack([_occurrences(as_integers(piece)) for piece in pieces]).sum(dim=0)
    return OptimizerValues(weights={part.stored.dtype: counts})


def _occurrences(bits: Tensor) -> Tensor:
    """Counts each number of a 16-bit dtype; `bits` are int16."""
    import torch

    return torch.bincount(bits.reshape(-1).to(torch.int64) & 0xFFFF, minlength=1 << 16)


def _measured(kind: str, tensor: Tensor) -> StateStats:
    stats = extremes(tensor.reshape(-1))
    return StateStats(kind, stats.nbytes, stats.finite, stats.low, stats.high)


def _nearest_up(master: Tensor) -> Tensor:
    """The bits of the nearest bfloat16, ties up, as Transformer Engine rounds with `store_param_remainders`."""
    import torch

    return ((as_integers(master) + 0x8000) >> 16).to(torch.int16)


def _count_unequal(master: Tensor, part: Part, digest: bytes | None) -> int:
    """Counts elements of a weight that are not its rounded master weights. `digest`: of the weight, if known."""
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
    """Counts the weights of this dtype without a master weight in a bucket, or 0 if they may be untrained weights."""
    weights = values.weights[dtype]
    fewer = max(0, int(weights.sum() - values.masters[dtype][0].sum()))
    missing = min(int((weights - masters).clamp(min=0).sum()) for masters in values.masters[dtype])
    return missing if missing > fewer else 0
