"""Checks that hundreds of tensors have the layout of earlier ones, in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def looks_like(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Returns a function that checks that other tensors have the same classes, dtypes, devices, shapes and strides.

    A Python loop over hundreds of tensors takes a third of the GPU's time for them. torch.compile's guards for its own
    arguments check all of them in one call.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:  # private to torch: a version may lack it
        expected = [_looks(tensor) for tensor in tensors]
        return lambda *others: [_looks(other) for other in others] == expected
    sizes: Any = [list(tensor.shape) for tensor in tensors]
    strides: Any = [list(tensor.stride()) for tensor in tensors]
    checked: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return checked


def _looks(tensor: Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride()
