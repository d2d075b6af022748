"""Shapes of what ops give, against sizes counted by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from families import CASES

from ckptkit.core.errors import CkptkitError
from converters.ops.shapes import Shape, ShapeOnly, cat, shape_of
from converters.planner import DIALECTS, mappings_of


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
    with pytest.raises(CkptkitError, match=rf"tensors {said} cannot be joined along axis 0"):
        shape_of(cat, shapes)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda tensors: tensors[0].reshape(4, -1), r"\[3, 5\] is not \[4, -1\]"),
        (lambda tensors: tensors[0].split_with_sizes([2, 2]), r"axis 0 of \[3, 5\] cannot be split into \[2, 2\]"),
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
