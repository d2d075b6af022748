"""Every op against expectations written by hand, with numbers that tell every row apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from families import CASES
from torch import Tensor

from ckptkit.converters.config.dims import LinearAttention
from ckptkit.converters.ops.basic import ByKeyHead, Copy, GatedQkv, GateUp, MinusOne, Op, Qkv, StackedRows, SwapHalves
from ckptkit.converters.ops.shapes import Shape, ShapeOnly, cat, shape_of
from ckptkit.converters.planner import DIALECTS, mappings_of
from ckptkit.core.errors import CkptkitError


def rows(*numbers: int) -> torch.Tensor:
    """A matrix with two columns whose row r is [r, -r]."""
    column = torch.tensor(numbers)
    return torch.stack([column, -column], dim=1)


def test_gate_up_op_inverts_and_shards() -> None:
    op = GateUp()
    gate, up = rows(1, 2, 3, 4), rows(11, 12, 13, 14)
    merged = op.merge([gate, up])
    assert torch.equal(merged, rows(1, 2, 3, 4, 11, 12, 13, 14))
    assert torch.equal(op.split(merged)[0], gate)
    assert torch.equal(op.split(merged)[1], up)
    assert torch.equal(op.shard(merged, 1, 2), rows(3, 4, 13, 14))


def test_swap_halves_op_inverts_and_shards() -> None:
    op = SwapHalves()
    matrix = torch.tensor([[1, 2, 11, 12], [3, 4, 13, 14]])
    merged = op.merge([matrix])
    assert merged.tolist() == [[11, 12, 1, 2], [13, 14, 3, 4]]
    assert torch.equal(op.split(merged)[0], matrix)
    assert op.shard(merged, 1, 2).tolist() == [[13, 14, 3, 4]]


def test_qkv_op_inverts_and_shards() -> None:
    # 4 heads in 2 groups, head_dim 2: a group is two query heads, a key, a value
    op = Qkv(heads=4, groups=2, head_dim=2)
    query, key, value = rows(0, 1, 2, 3, 4, 5, 6, 7), rows(20, 21, 22, 23), rows(30, 31, 32, 33)
    merged = op.merge([query, key, value])
    assert torch.equal(merged, rows(0, 1, 2, 3, 20, 21, 30, 31, 4, 5, 6, 7, 22, 23, 32, 33))
    for part, expected in zip(op.split(merged), (query, key, value), strict=True):
        assert torch.equal(part, expected)
    assert torch.equal(op.shard(merged, 1, 2), rows(4, 5, 6, 7, 22, 23, 32, 33))


def test_copy_shards_along_its_axis() -> None:
    matrix = torch.arange(12).reshape(4, 3)
    assert torch.equal(Copy().shard(matrix, 1, 2), matrix)
    assert Copy(0).shard(matrix, 1, 2).tolist() == [[6, 7, 8], [9, 10, 11]]
    assert Copy(1).shard(matrix, 2, 3).tolist() == [[2], [5], [8], [11]]


@pytest.mark.parametrize("op", [Copy(0), GateUp(), Qkv(6, 3, 1)])
def test_sizes_that_do_not_divide_are_refused(op: Copy | GateUp | Qkv) -> None:
    with pytest.raises(CkptkitError, match="does not divide|do not divide"):
        op.shard(torch.zeros(9 if isinstance(op, Copy) else 10, 2), 0, 4)


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
    with pytest.raises(CkptkitError, match="2.*query.*3"):
        op.shard(merged, 0, 3)


# 2 key heads of size 1, each with 2 value heads of size 2.
NET = LinearAttention(key_heads=2, value_heads=4, key_dim=1, value_dim=2, kernel=4, layers=(0,))
# Tens are the kind (query, key, value, gate, beta, alpha), ones count the rows of a kind.
BY_KIND = (10, 11, 20, 21, *range(30, 38), *range(40, 48), *range(50, 54), *range(60, 64))
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
    with pytest.raises(CkptkitError, match="4.*ranks"):
        op.shard(torch.zeros(12 if isinstance(op, StackedRows) else 28, 2), 0, 4)


def test_minus_one_op_inverts_and_shards() -> None:
    both_ways(MinusOne(), [torch.tensor([1.0, 0.5, -2.0])], torch.tensor([0.0, -0.5, -3.0]))
    assert MinusOne().shard(torch.tensor([1.0, 2.0]), 1, 2).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_rule_of_every_family_has_the_shapes_that_tensors_have(case: str, dialect: str) -> None:
    config = CASES[case].edit(CASES[case].config().to_dict())
    for mapping in mappings_of(config, dialect):
        op, whole = mapping.op, mapping.op.merge([torch.empty(shape, device="meta") for shape in mapping.hf.values()])
        assert mapping.megatron_shape == whole.shape
        for index, part in enumerate(op.split(whole)):
            assert shape_of(lambda one, op=op, index=index: op.split(one[0])[index], [tuple(whole.shape)]) == part.shape
        for size in (1, 2, 4):
            assert outcome(lambda op=op, size=size, whole=whole: op.shard(whole, 0, size).shape) == outcome(
                lambda op=op, size=size, whole=whole: shape_of(
                    lambda tensors: op.shard(tensors[0], 0, size), [tuple(whole.shape)]
                )
            )


def outcome(run: Callable[[], Sequence[int]]) -> tuple[int, ...] | str:
    """A shape, or why there is none."""
    try:
        return tuple(run())
    except CkptkitError as error:
        return str(error)


@pytest.mark.parametrize(
    ("shapes", "said"), [([(3, 5), (3, 4)], r"\[3, 5\], \[3, 4\]"), ([(3, 5), (3,)], r"\[3, 5\], \[3\]")]
)
def test_tensors_that_do_not_fit_are_refused(shapes: list[Shape], said: str) -> None:
    with pytest.raises(CkptkitError, match=f"{said}.*0"):
        shape_of(cat, shapes)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda tensors: tensors[0].reshape(4, -1), r"\[3, 5\] is not \[4, -1\]"),
        (lambda tensors: tensors[0].split_with_sizes([2, 2]), r"0.*\[3, 5\].*\[2, 2\]"),
    ],
)
def test_op_that_does_not_fit_is_refused(run: Any, said: str) -> None:
    with pytest.raises(CkptkitError, match=said):
        shape_of(run, [(3, 5)])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("rows", [0, 1, 7, 8])
def test_chunks_are_those_of_torch(rows: int, count: int) -> None:
    chunks = torch.empty(rows, 2).chunk(count)
    assert [part.shape for part in ShapeOnly((rows, 2)).chunk(count)] == [part.shape for part in chunks]
