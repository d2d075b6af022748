"""Ops of hybrid families: attention with an output gate, the projections of a gated delta net, the state of KDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.config.dims import LinearAttention
from converters.ops.basic import Qkv, chunk
from converters.ops.shapes import cat

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GatedQkv(Qkv):
    """As Qkv, with an output gate in q_proj [2 x heads x head_dim, ...]: each head's q rows, then its gate rows.

    Megatron keeps for every query group its q heads, then their gates, then its k, then its v (megatron-core
    `attention.py`, `get_query_key_value_tensors` with `output_gate`).
    """

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        query, key, value = tensors
        rest = query.shape[1:]
        heads = query.reshape(self.groups, -1, 2, self.head_dim, *rest).transpose(1, 2).flatten(1, 2)
        parts = [heads, *(part.reshape(self.groups, -1, self.head_dim, *rest) for part in (key, value))]
        return cat(parts, dim=1).reshape(-1, *rest)

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        rest = tensor.shape[1:]
        grouped = tensor.reshape(self.groups, -1, self.head_dim, *rest)
        query, key, value = grouped.split_with_sizes([2 * self.heads // self.groups, 1, 1], dim=1)
        query = query.reshape(self.groups, 2, -1, self.head_dim, *rest).transpose(1, 2)
        return tuple(part.reshape(-1, *rest) for part in (query, key, value))


@dataclass(frozen=True)
class MinusOne:
    """A norm's weight minus one, as Megatron's zero-centred norms store it. The rule must be `upcast`: no rounding."""

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        (weight,) = tensors
        return weight - 1

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor + 1,)

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return tensor


@dataclass(frozen=True)
class ZeroPadded:
    """A vector of `size` values that HF keeps with `padding` zeros behind them, and Megatron without.

    The planner refuses a padding that is not zero (`is_padded`), which would be lost.
    """

    size: int
    padding: int

    def is_padded(self, tensor: Tensor) -> bool:
        """Whether every bit behind the values is 0."""
        import torch  # only where there are tensors

        return not bool(tensor[self.size :].view(torch.uint8).any())

    def merge(self, tensors: Sequence[Tensor]) -> Tensor:
        (tensor,) = tensors
        return tensor.split_with_sizes([self.size, self.padding])[0]

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (cat([tensor, tensor.new_zeros(self.padding)]),)

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return chunk(tensor, 0, rank, size)


def _shard_sections(tensor: Tensor, sections: Sequence[int], rank: int, size: int) -> Tensor:
    return cat([chunk(part, 0, rank, size) for part in tensor.split_with_sizes(list(sections))])


@dataclass(frozen=True)
class StackedRows:
    """Stacked matrices of `parts` rows each. Tensor parallelism cuts each of the `sections` of their rows alone."""

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
    """Qwen3-Next's in_proj_qkvz and in_proj_ba, ordered by key head, as Megatron's in_proj, ordered by kind.

    Rows of a key head in in_proj_qkvz: its query, its key, then the values and the output gates (z) of its value heads.
    In in_proj_ba: beta, then alpha, of its value heads (transformers `fix_query_key_value_ordering`). Megatron has all
    queries, keys, values, gates, betas and alphas in turn (megatron-core `gated_delta_net`).
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
        """Rows a key head of each kind, in in_proj_qkvz and in in_proj_ba."""
        rows = [count // self.net.key_heads for count in self.net.in_proj]
        return rows[:4], rows[4:]

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return _shard_sections(tensor, self.net.in_proj, rank, size)
