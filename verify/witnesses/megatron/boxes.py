"""Which elements of a tensor a set of boxes leaves out, and which it takes twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verify.witnesses.megatron.job import Box

_Grid = list[NDArray[np.int64]]


@dataclass(frozen=True)
class Region:
    """The smallest box around some elements of a tensor, and how many they are."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    elements: int

    def __str__(self) -> str:
        box = ", ".join(f"{start}:{end}" for start, end in zip(self.starts, self.ends, strict=True))
        inside = math.prod(end - start for start, end in zip(self.starts, self.ends, strict=True))
        return f"[{box}]" if inside == self.elements else f"{self.elements} elements of [{box}]"


def unread(shape: Sequence[int], boxes: Sequence[Box]) -> Region | None:
    """What no box holds of a tensor of this shape; None where they cover it. What lies outside does not count."""
    grid, count = _counted(shape, boxes)
    return _region(grid, count == 0)


def doubly_owned(shape: Sequence[int], boxes: Sequence[Box]) -> Region | None:
    """What several different boxes of main replicas hold; Megatron's rule is that each element has one."""
    grid, count = _counted(shape, [box for box in boxes if box.main])
    return _region(grid, count > 1)


def _counted(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[_Grid, NDArray[np.int64]]:
    """The tensor, cut wherever a box begins or ends, and how many distinct boxes hold each cell."""
    distinct = sorted({(box.offsets, box.sizes) for box in boxes})
    low = np.array([offsets for offsets, _ in distinct], dtype=np.int64).reshape(len(distinct), len(shape))
    high = low + np.array([sizes for _, sizes in distinct], dtype=np.int64).reshape(low.shape)
    limits = np.array(shape, dtype=np.int64)
    low, high = np.clip(low, 0, limits), np.clip(high, 0, limits)
    grid = [np.unique([0, size, *low[:, axis], *high[:, axis]]) for axis, size in enumerate(shape)]
    count = np.zeros([len(edges) - 1 for edges in grid], dtype=np.int64)
    for start, end in zip(low, high, strict=True):
        cells = zip(grid, start, end, strict=True)
        count[tuple(slice(*np.searchsorted(edges, (first, last))) for edges, first, last in cells)] += 1
    return grid, count


def _region(grid: _Grid, cells: NDArray[np.bool_]) -> Region | None:
    if not cells.any():
        return None
    places = np.nonzero(cells) if cells.ndim else ()
    sizes = [np.diff(edges)[at] for edges, at in zip(grid, places, strict=True)]
    elements = int(np.prod(sizes, axis=0).sum()) if sizes else 1
    starts = tuple(int(edges[at.min()]) for edges, at in zip(grid, places, strict=True))
    ends = tuple(int(edges[at.max() + 1]) for edges, at in zip(grid, places, strict=True))
    return Region(starts, ends, elements)
