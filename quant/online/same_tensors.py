"""Whether tensors are like those that were seen before, asked of hundreds at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def looks_like(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that tells whether as many other tensors are of the same classes, dtypes, devices, shapes and strides.

    Asking each of hundreds of tensors in Python takes as long as a third of the GPU's work; the guards that torch.compile has for its
    own arguments ask them all in one call.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:  # no public part of torch: a version may come without it
        expected = [_looks(tensor) for tensor in tensors]
        return lambda *others: [_looks(other) for other in others] == expected
    sizes: Any = [list(tensor.shape) for tensor in tensors]
    strides: Any = [list(tensor.stride()) for tensor in tensors]
    checked: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return checked


def _looks(tensor: Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride()
