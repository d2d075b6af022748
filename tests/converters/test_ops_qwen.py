"""The ops of the hybrid Qwen families against expectations written by hand, with numbers that tell every row apart."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ckptkit.core.errors import CkptkitError
from converters.config.dims import LinearAttention
from converters.ops.basic import ByKeyHead, GatedQkv, MinusOne, Op, StackedRows


def rows(*numbers: int) -> Tensor:
    """A matrix with two columns whose row r is [r, -r]."""
    column = torch.tensor(numbers)
    return torch.stack([column, -column], dim=1)


def both_ways(op: Op, parts: Sequence[Tensor], merged: Tensor) -> None:
    assert torch.equal(op.merge(parts), merged)
    found = op.split(merged)
    assert len(found) == len(parts)
    assert all(torch.equal(part, expected) for part, expected in zip(found, parts, strict=True))


def test_gated_qkv_op_inverts_and_shards() -> None:
    """Head n of 4 in 2 groups: query rows n0 and n1, gate rows n5 and n6; keys 60 and up, values 80 and up."""
    op = GatedQkv(heads=4, groups=2, head_dim=2)
    query = rows(10, 11, 15, 16, 20, 21, 25, 26, 30, 31, 35, 36, 40, 41, 45, 46)
    first = (10, 11, 20, 21, 15, 16, 25, 26, 60, 61, 80, 81)
    second = (30, 31, 40, 41, 35, 36, 45, 46, 62, 63, 82, 83)
    merged = rows(*first, *second)
    both_ways(op, [query, rows(60, 61, 62, 63), rows(80, 81, 82, 83)], merged)
    assert torch.equal(op.shard(merged, 1, 2), rows(*second))
    assert torch.equal(op.shard(merged, 3, 4), rows(*second[6:]))  # the half of a group
    with pytest.raises(CkptkitError, match="2 query groups do not divide over 3"):
        op.shard(merged, 0, 3)


# 2 key heads of size 1, each with 2 value heads of size 2.
NET = LinearAttention(key_heads=2, value_heads=4, key_dim=1, value_dim=2, kernel=4, layers=(0,))
# Tens are the kind (query, key, value, gate, beta, alpha), ones count the rows of a kind.
BY_KIND = (
    10,
    11,
    20,
    21,
    30,
    31,
    32,
    33,
    34,
    35,
    36,
    37,
    40,
    41,
    42,
    43,
    44,
    45,
    46,
    47,
    50,
    51,
    52,
    53,
    60,
    61,
    62,
    63,
)
BY_KIND_SECOND_RANK = (11, 21, 34, 35, 36, 37, 44, 45, 46, 47, 52, 53, 62, 63)


def test_input_projection_ordered_by_key_head() -> None:
    qkvz = rows(10, 20, 30, 31, 32, 33, 40, 41, 42, 43, 11, 21, 34, 35, 36, 37, 44, 45, 46, 47)
    beta_alpha = rows(50, 51, 60, 61, 52, 53, 62, 63)
    both_ways(ByKeyHead(NET), [qkvz, beta_alpha], rows(*BY_KIND))
    assert torch.equal(ByKeyHead(NET).shard(rows(*BY_KIND), 1, 2), rows(*BY_KIND_SECOND_RANK))


def test_input_projection_ordered_by_kind() -> None:
    op = StackedRows((12, 8, 4, 4), NET.in_proj)
    parts = [rows(*BY_KIND[:12]), rows(*BY_KIND[12:20]), rows(50, 51, 52, 53), rows(60, 61, 62, 63)]
    both_ways(op, parts, rows(*BY_KIND))
    assert torch.equal(op.shard(rows(*BY_KIND), 1, 2), rows(*BY_KIND_SECOND_RANK))


def test_convolution_op_inverts_and_shards() -> None:
    op = StackedRows((12,), NET.conv)
    whole = torch.tensor(BY_KIND[:12]).reshape(12, 1, 1)
    both_ways(op, [whole], whole)
    assert op.shard(whole, 1, 2).flatten().tolist() == [11, 21, 34, 35, 36, 37]


@pytest.mark.parametrize("op", [StackedRows((12,), NET.conv), ByKeyHead(NET)])
def test_key_heads_that_do_not_divide_are_refused(op: Op) -> None:
    with pytest.raises(CkptkitError, match="does not divide over 4 tensor-parallel ranks"):
        op.shard(torch.zeros(12 if isinstance(op, StackedRows) else 28, 2), 0, 4)


def test_minus_one_op_inverts_and_shards() -> None:
    both_ways(MinusOne(), [torch.tensor([1.0, 0.5, -2.0])], torch.tensor([0.0, -0.5, -3.0]))
    assert MinusOne().shard(torch.tensor([1.0, 2.0]), 1, 2).tolist() == [1.0, 2.0]
