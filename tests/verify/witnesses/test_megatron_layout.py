"""Pipelines of the witness whose layers do not divide: what is left over goes to the last stage, as in slime."""

from __future__ import annotations

import models
import pytest

from ckptkit.core.errors import CkptkitError
from converters.planner import dims_of
from verify.witnesses.megatron.layout import ParallelSizes, check_sizes, with_remainder

DIMS = dims_of(models.configs()["qwen2-tied"].to_dict())


@pytest.mark.parametrize(
    ("layers", "sizes", "last"),
    [
        (92, ParallelSizes(pp=4), None),
        (92, ParallelSizes(pp=8), 8),  # 7 x 12 + 8
        (61, ParallelSizes(pp=8), 5),  # 7 x 8 + 5
        (11, ParallelSizes(pp=3), 3),
        (12, ParallelSizes(pp=5), None),  # four stages of 3 leave nothing
        (12, ParallelSizes(pp=8), None),
        (11, ParallelSizes(pp=2, vpp=2), None),  # Megatron cannot cut a stage of 6 and one of 5 into chunks alike
    ],
)
def test_what_is_left_over(layers: int, sizes: ParallelSizes, last: int | None) -> None:
    assert with_remainder(sizes, layers).last == last


def test_the_stages_that_follow() -> None:
    sizes = ParallelSizes(pp=3, first=2, last=4)
    check_sizes(sizes, DIMS)
    assert sizes.pipeline(DIMS).stages == ((tuple(range(2)),), (tuple(range(2, 8)),), (tuple(range(8, 12)),))
    assert str(sizes) == "TP1 PP3, first stage 2 layers, last stage 4 layers"
    assert str(ParallelSizes(pp=2, layout="Et*8|t*4L")) == "TP1 PP2, Et*8|t*4L"
    with pytest.raises(CkptkitError, match="9 layers do not divide over the 2 other stages"):
        check_sizes(ParallelSizes(pp=3, last=3), DIMS)
