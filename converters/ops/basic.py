"""Ops turn HF tensors into a Megatron tensor and back. Each is pure, invertible, and runs on shapes alone too.

`merge` takes the HF tensors of a rule and gives Megatron's one; `split` is its exact inverse;
`shard` cuts Megatron's global tensor as tensor-parallel rank `rank` of `size` holds it (only verify needs that).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ckptkit.core.errors import CkptkitError
from converters.ops.shapes import cat

if TYPE_CHECKING:
    from torch import Tensor


class Op(Protocol):
    """A bijection between the HF tensors of one rule and one Megatron tensor."""

    def merge(self, tensors: Sequence[Tensor]) -> Tensor: ...
    def split(self, tensor: Tensor) -> tuple[Tensor, ...]: ...
    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor: ...


def chunk(tensor: Tensor, axis: int, rank: int, size: int) -> Tensor:
    """Part `rank` of `size` equal parts along `axis`. Raises CkptkitError when it does not divide."""
    if tensor.shape[axis] % size:
        raise CkptkitError(
            f"axis {axis} of {list(tensor.shape)} does not divide over {size} tensor-parallel ranks",
            "choose a smaller --tp",
        )
    return tensor.chunk(size, dim=axis)[rank]


@dataclass(frozen=True)
class Copy:
    """One tensor on both sides. `axis` is the tensor-parallel axis; None means every rank holds all of it."""

    axis: int | None = None

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        return tensor

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor,)

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return tensor if self.axis is None else chunk(tensor, self.axis, rank, size)


@dataclass(frozen=True)
class OneRow:
    """A vector that HF keeps as the only row of a matrix, whole on every rank."""

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        return tensor.reshape(-1)

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor.reshape(1, -1),)

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return tensor


@dataclass(frozen=True)
class SwapHalves:
    """A matrix [rows, 2 x columns] over two input vectors that Megatron takes in the other order.

    Its rows are cut over tensor-parallel ranks.
    """

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        return _halves_swapped(tensor)

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (_halves_swapped(tensor),)

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return chunk(tensor, 0, rank, size)


def _halves_swapped(tensor: Tensor) -> Tensor:
    first, second = tensor.chunk(2, dim=1)
    return cat([second, first], dim=1)


@dataclass(frozen=True)
class GateUp:
    """SwiGLU: gate_proj and up_proj, each [ffn, hidden], one above the other as linear_fc1 [2 ffn, hidden].

    The global tensor is independent of tensor parallelism; a rank's own linear_fc1 is its gate rows above its up rows.
    """

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        gate, up = tensors
        return cat([gate, up])

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.chunk(2)

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return cat([chunk(half, 0, rank, size) for half in tensor.chunk(2)])


@dataclass(frozen=True)
class GateUpInOne:
    """Gate above up in one matrix [2 ffn, hidden], in the release as in linear_fc1. Ranks hold it as with `GateUp`."""

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        return tensor

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor,)

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return GateUp().shard(tensor, rank, size)


@dataclass(frozen=True)
class Qkv:
    """Attention: q_proj [heads x head_dim, ...], k_proj and v_proj [groups x head_dim, ...] as linear_qkv.

    Megatron keeps a query group together: its q heads, then its k, then its v. Works for weights and biases.
    """

    heads: int
    groups: int
    head_dim: int

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        query, key, value = tensors
        rest = query.shape[1:]
        parts = [part.reshape(self.groups, -1, self.head_dim, *rest) for part in (query, key, value)]
        return cat(parts, dim=1).reshape(-1, *rest)

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        rest = tensor.shape[1:]
        grouped = tensor.reshape(self.groups, -1, self.head_dim, *rest)
        parts = grouped.split_with_sizes([self.heads // self.groups, 1, 1], dim=1)
        return tuple(part.reshape(-1, *rest) for part in parts)

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        # More ranks than groups: each holds a part of a group's rows (megatron-core `Attention`).
        if self.groups % size and size % self.groups:
            raise CkptkitError(
                f"{self.groups} query groups do not divide over {size} tensor-parallel ranks",
                "choose a --tp that divides them",
            )
        return chunk(tensor, 0, rank, size)


@dataclass(frozen=True)
class QkvInOne(Qkv):
    """As Qkv, where the release has the rows of all queries, keys and values one above the other in one tensor."""

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        keys = self.groups * self.head_dim
        return super().merge(tensor.split_with_sizes([self.heads * self.head_dim, keys, keys]))

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (cat(super().split(tensor)),)
