"""Ops convert HF tensors to a Megatron tensor and back. They are pure and invertible, and also run on shapes.

`merge` converts the HF tensors of a rule to Megatron's tensor; `split` is its exact inverse; `shard` returns the part
of Megatron's global tensor on tensor-parallel rank `rank` of `size` (only verify needs that).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ckptkit.converters.config.dims import LinearAttention
from ckptkit.converters.ops.shapes import cat
from ckptkit.core.errors import CkptkitError

if TYPE_CHECKING:
    from torch import Tensor


class Op(Protocol):
    """A bijection between the HF tensors of one rule and one Megatron tensor."""

    def merge(self, tensors: Sequence[Tensor]) -> Tensor: ...
    def split(self, tensor: Tensor) -> tuple[Tensor, ...]: ...
    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor: ...


def chunk(tensor: Tensor, axis: int, rank: int, size: int) -> Tensor:
    """Part `rank` of `size` equal parts along `axis`. Raises CkptkitError if the axis does not divide."""
    if tensor.shape[axis] % size:
        message = f"axis {axis} of a {list(tensor.shape)} tensor is not divisible by {size} tensor-parallel ranks"
        raise CkptkitError(message, "choose a smaller --tp")
    return tensor.chunk(size, dim=axis)[rank]


class OneToOne:
    """Base of ops between two single tensors. By default every rank holds the complete tensor."""

    def forward(self, tensor: Tensor) -> Tensor:
        """Megatron's tensor, from HF's."""
        return tensor

    def back(self, tensor: Tensor) -> Tensor:
        """HF's tensor, from Megatron's."""
        return tensor

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        return self.forward(tensor)

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (self.back(tensor),)

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return tensor


@dataclass(frozen=True)
class Copy(OneToOne):
    """The same tensor on both sides. `axis`: the tensor-parallel axis, or None if every rank holds all of it."""

    axis: int | None = None

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return tensor if self.axis is None else chunk(tensor, self.axis, rank, size)


@dataclass(frozen=True)
class OneRow(OneToOne):
    """A vector that HF stores as the only row of a matrix."""

    def forward(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(-1)

    def back(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(1, -1)


@dataclass(frozen=True)
class SwapHalves(OneToOne):
    """A matrix [rows, 2 x columns] over two input vectors that Megatron has in reverse order; ranks share its rows."""

    def forward(self, tensor: Tensor) -> Tensor:
        first, second = tensor.chunk(2, dim=1)
        return cat([second, first], dim=1)

    back = forward

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return chunk(tensor, 0, rank, size)


@dataclass(frozen=True)
class GateUp:
    """SwiGLU: gate_proj above up_proj, each [ffn, hidden], as linear_fc1 [2 ffn, hidden].

    The global tensor is independent of tensor parallelism; a rank's linear_fc1 is its gate rows above its up rows.
    """

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        gate, up = tensors
        return cat([gate, up])

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.chunk(2)

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return cat([chunk(half, 0, rank, size) for half in tensor.chunk(2)])


@dataclass(frozen=True)
class GateUpInOne(OneToOne):
    """Gate above up in one matrix [2 ffn, hidden], in the release and in linear_fc1. Sharded like `GateUp`."""

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
        query, *keys_values = (one.reshape(self.groups, -1, self.head_dim, *one.shape[1:]) for one in tensors)
        return cat([self._reorder(query, back=False), *keys_values], dim=1).reshape(-1, *tensors[0].shape[1:])

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        columns = tensor.shape[1:]
        grouped = tensor.reshape(self.groups, -1, self.head_dim, *columns)
        query, *keys_values = grouped.split_with_sizes([grouped.shape[1] - 2, 1, 1], dim=1)
        return tuple(part.reshape(-1, *columns) for part in (self._reorder(query, back=True), *keys_values))

    def _reorder(self, query: Tensor, *, back: bool) -> Tensor:
        """A group's part of q_proj in Megatron's order, or in HF's if `back`."""
        return query

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        # With more ranks than groups, each holds a part of a group's rows (megatron-core `Attention`).
        if self.groups % size and size % self.groups:
            message = f"{self.groups} query groups are neither a multiple nor a divisor of {size} tensor-parallel ranks"
            raise CkptkitError(message, "choose a --tp that divides the query groups")
        return chunk(tensor, 0, rank, size)


@dataclass(frozen=True)
class QkvInOne(Qkv):
    """Like Qkv, if the release has all queries, keys and values in one tensor, in this order."""

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        keys = self.groups * self.head_dim
        return super().merge(tensor.split_with_sizes([self.heads * self.head_dim, keys, keys]))

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (cat(super().split(tensor)),)


@dataclass(frozen=True)
class GatedQkv(Qkv):
    """Like Qkv, with an output gate in q_proj [2 x heads x head_dim, ...]: each head's q rows, then its gate rows.

    Megatron stores for every query group its q heads, their gates, its k, and its v (megatron-core `attention.py`,
    `get_query_key_value_tensors` with `output_gate`).
    """

    def _reorder(self, query: Tensor, *, back: bool) -> Tensor:
        sizes = (2, -1) if back else (-1, 2)
        return query.reshape(self.groups, *sizes, *query.shape[2:]).transpose(1, 2).flatten(1, 2)


@dataclass(frozen=True)
class MinusOne(OneToOne):
    """A norm's weight minus one, for Megatron's zero-centred norms. The rule must be `upcast` to avoid rounding."""

    def forward(self, tensor: Tensor) -> Tensor:
        return tensor - 1

    def back(self, tensor: Tensor) -> Tensor:
        return tensor + 1


@dataclass(frozen=True)
class ZeroPadded(OneToOne):
    """A vector of `size` values that HF pads with `padding` zeros, and Megatron does not.

    The planner rejects a padding that is not zero (`is_padded`), because it would be lost.
    """

    size: int
    padding: int

    def is_padded(self, tensor: Tensor) -> bool:
        """Whether every bit after the values is 0."""
        import torch

        return not bool(tensor[self.size :].view(torch.uint8).any())

    def forward(self, tensor: Tensor) -> Tensor:
        return tensor.split_with_sizes([self.size, self.padding])[0]

    def back(self, tensor: Tensor) -> Tensor:
        return cat([tensor, tensor.new_zeros(self.padding)])

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return chunk(tensor, 0, rank, size)


def _shard_sections(tensor: Tensor, sections: Sequence[int], rank: int, size: int) -> Tensor:
    return cat([chunk(part, 0, rank, size) for part in tensor.split_with_sizes(list(sections))])


@dataclass(frozen=True)
class StackedRows:
    """Stacked matrices with `parts` rows. Tensor parallelism cuts each of the `sections` of rows separately."""

    parts: tuple[int, ...]
    sections: tuple[int, ...]

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        return cat(tensors)

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.split_with_sizes(list(self.parts)))

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return _shard_sections(tensor, self.sections, rank, size)


@dataclass(frozen=True)
class ByKeyHead:
    """Qwen3-Next's in_proj_qkvz and in_proj_ba, ordered by key head, to Megatron's in_proj, ordered by kind.

    Rows of a key head in in_proj_qkvz: its query, its key, then the values and the output gates (z) of its value heads.
    In in_proj_ba: beta, then alpha, of its value heads (transformers `fix_query_key_value_ordering`). Megatron has all
    queries, then all keys, values, gates, betas and alphas (megatron-core `gated_delta_net`).
    """

    net: LinearAttention

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        by_head = [tensor.reshape(self.net.key_heads, -1, tensor.shape[-1]) for tensor in tensors]
        parts = [
            part
            for tensor, rows in zip(by_head, self._rows, strict=True)
            for part in tensor.split_with_sizes(rows, dim=1)
        ]
        return cat([part.flatten(0, 1) for part in parts])

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        parts = [
            part.reshape(self.net.key_heads, -1, tensor.shape[-1])
            for part in tensor.split_with_sizes(list(self.net.in_proj))
        ]
        return cat(parts[:4], dim=1).flatten(0, 1), cat(parts[4:], dim=1).flatten(0, 1)

    @property
    def _rows(self) -> tuple[list[int], list[int]]:
        """Rows of each kind per key head, in in_proj_qkvz and in in_proj_ba."""
        rows = [count // self.net.key_heads for count in self.net.in_proj]
        return rows[:4], rows[4:]

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return _shard_sections(tensor, self.net.in_proj, rank, size)
