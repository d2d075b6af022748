"""Shapes of what ops give, against sizes counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ckptkit.core.errors import CkptkitError
from converters.blocks.indexer import RotaryLast
from converters.config.dims import LinearAttention
from converters.ops.basic import Copy, GateUp, Qkv, SwapHalves
from converters.ops.hybrid import ByKeyHead, GatedQkv, MinusOne, StackedRows
from converters.ops.shapes import Shape, shape_of

# 2 key heads of 3, 4 value heads of 5: queries 6, keys 6, values 20, gates 20, betas 4, alphas 4.
NET = LinearAttention(key_heads=2, value_heads=4, key_dim=3, value_dim=5, kernel=4, layers=(0,))


@pytest.mark.parametrize(
    ("op", "shapes", "expected"),
    [
        (Copy(), [(3, 5)], (3, 5)),
        (SwapHalves(), [(3, 10)], (3, 10)),
        (GateUp(), [(7, 3), (7, 3)], (14, 3)),
        (GateUp(), [(7,), (7,)], (14,)),
        (Qkv(heads=6, groups=2, head_dim=5), [(30, 4), (10, 4), (10, 4)], (50, 4)),
        (Qkv(heads=6, groups=2, head_dim=5), [(30,), (10,), (10,)], (50,)),
        (GatedQkv(heads=6, groups=2, head_dim=5), [(60, 4), (10, 4), (10, 4)], (80, 4)),
        (MinusOne(), [(9,)], (9,)),
        (RotaryLast(head_dim=4, rope=1), [(12, 3)], (12, 3)),
        (StackedRows((4, 1, 2), (5, 2)), [(4, 3), (1, 3), (2, 3)], (7, 3)),
        (ByKeyHead(NET), [(52, 11), (8, 11)], (60, 11)),
    ],
)
def test_merged_shapes(op: Any, shapes: list[Shape], expected: Shape) -> None:
    assert shape_of(op.merge, shapes) == expected


@pytest.mark.parametrize("dim", [1, -1])
def test_joins_along_any_axis(dim: int) -> None:
    def merge(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors), dim=dim)

    assert shape_of(merge, [(3, 5), (3, 2), (3, 0)]) == (3, 7)


def test_the_first_axis_is_the_default() -> None:
    assert shape_of(lambda tensors: torch.cat(list(tensors)), [(3, 5), (1, 5)]) == (4, 5)


@pytest.mark.parametrize(
    ("shapes", "said"), [([(3, 5), (3, 4)], r"\[3, 5\], \[3, 4\]"), ([(3, 5), (3,)], r"\[3, 5\], \[3\]")]
)
def test_tensors_that_do_not_fit_are_refused(shapes: list[Shape], said: str) -> None:
    with pytest.raises(CkptkitError, match=rf"tensors {said} cannot be joined along axis 0"):
        shape_of(lambda tensors: torch.cat(list(tensors)), shapes)


def test_no_memory_is_filled() -> None:
    """The sizes of a trillion elements, arranged in every way that ops arrange them."""
    heads = 1 << 12
    assert shape_of(
        Qkv(heads, heads // 8, 1 << 8).merge, [(1 << 20, 1 << 20), (1 << 17, 1 << 20), (1 << 17, 1 << 20)]
    ) == (10 << 17, 1 << 20)
    assert shape_of(
        GatedQkv(heads, heads // 8, 1 << 8).merge, [(1 << 21, 1 << 20), (1 << 17, 1 << 20), (1 << 17, 1 << 20)]
    ) == (18 << 17, 1 << 20)
    assert shape_of(SwapHalves().merge, [(1 << 20, 1 << 20)]) == (1 << 20, 1 << 20)


def test_outside_torch_joins_as_ever() -> None:
    shape_of(GateUp().merge, [(1, 2), (1, 2)])
    assert torch.cat([torch.ones(1, 2), torch.zeros(1, 2)]).tolist() == [[1, 1], [0, 0]]
