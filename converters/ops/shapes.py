"""Which shape an op gives, found without weights: the op runs on tensors that look as large as they are said to be, and hold one byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ckptkit.core.errors import CkptkitError

Shape = tuple[int, ...]


def shape_of(run: Callable[[Sequence[Tensor]], Tensor], shapes: Iterable[Shape]) -> Shape:
    """The shape of what `run` makes of tensors of these shapes. Raises CkptkitError where it joins tensors that do not fit.

    `run` is to arrange tensors, as ops do, and to compute little: that is done for all the elements that there seem to be.
    """
    # Not on meta tensors: the first kernel that torch has for those in Python imports its compiler, which takes seconds.
    with _JoinedBySize():
        return tuple(run([_one_byte(shape) for shape in shapes]).shape)


def _one_byte(shape: Sequence[int]) -> Tensor:
    return torch.zeros((), dtype=torch.uint8).expand(*shape)


class _JoinedBySize(TorchFunctionMode):
    """Does `torch.cat`, the one thing that would make ops fill memory, by sizes alone."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_joined if function is torch.cat else function)(*args, **(kwargs or {}))


def _joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    first = tensors[0]
    axis = dim % first.ndim
    if len({(*tensor.shape[:axis], *tensor.shape[axis + 1 :]) for tensor in tensors}) > 1:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise CkptkitError(
            f"tensors {shapes} cannot be joined along axis {axis}", "this is a defect in a rule: please report it"
        )
    return _one_byte([*first.shape[:axis], sum(tensor.shape[axis] for tensor in tensors), *first.shape[axis + 1 :]])
