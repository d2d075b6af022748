"""Every op against expectations written by hand, with numbers that tell every row apart."""

from __future__ import annotations

import pytest
import torch

from ckptkit.core.errors import CkptkitError
from converters.ops.basic import Copy, GateUp, Qkv, SwapHalves


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


def test_qkv_bias_op_inverts() -> None:
    op = Qkv(heads=2, groups=1, head_dim=1)
    merged = op.merge([torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4])])
    assert merged.tolist() == [1, 2, 3, 4]
    assert [part.tolist() for part in op.split(merged)] == [[1, 2], [3], [4]]


def test_copy_shards_along_its_axis() -> None:
    matrix = torch.arange(12).reshape(4, 3)
    assert torch.equal(Copy().shard(matrix, 1, 2), matrix)
    assert Copy(0).shard(matrix, 1, 2).tolist() == [[6, 7, 8], [9, 10, 11]]
    assert Copy(1).shard(matrix, 2, 3).tolist() == [[2], [5], [8], [11]]


@pytest.mark.parametrize("op", [Copy(0), GateUp(), Qkv(6, 3, 1)])
def test_sizes_that_do_not_divide_are_refused(op: Copy | GateUp | Qkv) -> None:
    with pytest.raises(CkptkitError, match="does not divide|do not divide"):
        op.shard(torch.zeros(9 if isinstance(op, Copy) else 10, 2), 0, 4)
