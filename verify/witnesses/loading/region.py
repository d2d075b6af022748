"""A part of a block of memory, in elements. It can be described, sent and read without torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Region:
    """Elements of a block of memory: `offset` and `strides` are counted in elements."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, flat: Tensor) -> Tensor:
        """This part of a block, given as its elements in the order of their addresses."""
        return flat.as_strided(self.sizes, self.strides, flat.storage_offset() + self.offset)

    @property
    def count(self) -> int:
        return prod(self.sizes)

    @property
    def end(self) -> int:
        """The offset behind the last element."""
        return self.offset + 1 + sum((size - 1) * step for size, step in zip(self.sizes, self.strides, strict=True))


def covered(count: int, regions: Iterable[Region]) -> int:
    """The number of elements, of `count`, that are in any of the regions."""
    import torch

    # The greatest common divisor of all offsets and lengths counts as one element.
    runs = []
    for region in regions:
        steps = {step: size for size, step in zip(region.sizes, region.strides, strict=True) if size != 1 and step}
        runs.append((region.offset, steps.pop(1, 1), steps))  # offset, length of contiguous runs, their number by step
    step = gcd(count, *(number for offset, length, steps in runs for number in (offset, length, *steps)))
    seen = torch.zeros(count // max(step, 1), dtype=torch.bool)
    for offset, length, steps in runs:
        strides = tuple(one // step for one in steps)
        Region(offset // step, (*steps.values(), length // step), (*strides, 1)).of(seen).fill_(True)
    return int(seen.sum()) * step
