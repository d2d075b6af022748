"""Computes the output shape of an op without torch, by running it on stand-ins that have only a shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from ckptkit.core.errors import CkptkitError

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


def shape_of(run: Callable[[Sequence[Tensor]], Tensor], shapes: Iterable[Shape]) -> Shape:
    """The output shape of `run` for tensors of these shapes. Raises CkptkitError if they do not fit.

    `run` may only use the methods of `ShapeOnly`, and `cat` to join tensors.
    """
    stand_ins: list[Any] = [ShapeOnly(tuple(shape)) for shape in shapes]
    return tuple(run(stand_ins).shape)


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`torch.cat` that also joins stand-ins."""
    if isinstance(tensors[0], ShapeOnly):
        return tensors[0].joined(tensors, dim)
    import torch

    return torch.cat(list(tensors), dim)


@dataclass(frozen=True)
class ShapeOnly:
    """The methods of torch.Tensor that ops use, with the same arguments."""

    shape: Shape

    def reshape(self, *sizes: Any) -> ShapeOnly:
        target = sizes[0] if isinstance(sizes[0], tuple) else sizes
        count, known = math.prod(self.shape), math.prod(size for size in target if size != -1)
        result = tuple(count // max(known, 1) if size == -1 else size for size in target)
        return ShapeOnly(result) if math.prod(result) == count else _refuse(f"{list(self.shape)} is not {list(target)}")

    def flatten(self, first: int = 0, last: int = -1) -> ShapeOnly:
        end = last % len(self.shape) + 1
        return ShapeOnly((*self.shape[:first], math.prod(self.shape[first:end]), *self.shape[end:]))

    def transpose(self, one: int, other: int) -> ShapeOnly:
        sizes = list(self.shape)
        sizes[one], sizes[other] = sizes[other], sizes[one]
        return ShapeOnly(tuple(sizes))

    def roll(self, by: int, dims: int) -> ShapeOnly:
        return self

    def split_with_sizes(self, sizes: Sequence[int], dim: int = 0) -> tuple[ShapeOnly, ...]:
        if sum(sizes) != self.shape[dim]:
            _refuse(f"axis {dim} of {list(self.shape)} cannot be split into {list(sizes)}")
        return tuple(self._with(dim, size) for size in sizes)

    def chunk(self, count: int, dim: int = 0) -> tuple[ShapeOnly, ...]:
        size = -(-self.shape[dim] // count)
        starts = range(0, self.shape[dim], size) if size else [0] * count
        return tuple(self._with(dim, min(size, self.shape[dim] - start)) for start in starts)

    def new_zeros(self, size: int) -> ShapeOnly:
        return ShapeOnly((size,))

    def __add__(self, number: int) -> ShapeOnly:
        return self

    def __sub__(self, number: int) -> ShapeOnly:
        return self

    def joined(self, others: Sequence[Any], dim: int) -> Any:
        """The result of `torch.cat` for `others`, which include this one."""
        axis = dim % len(self.shape)
        if len({(*one.shape[:axis], *one.shape[axis + 1 :]) for one in others}) > 1:
            _refuse(f"tensors {', '.join(str(list(one.shape)) for one in others)} cannot be joined along axis {axis}")
        return self._with(axis, sum(one.shape[axis] for one in others))

    def _with(self, axis: int, size: int) -> ShapeOnly:
        return ShapeOnly((*self.shape[:axis], size, *self.shape[axis + 1 :]))


def _refuse(message: str) -> NoReturn:
    raise CkptkitError(message, "this is a defect in a rule: please report it")
