"""Models of which the installed transformers has no class: parameters under published names, which compute nothing."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

BF16, F32 = torch.bfloat16, torch.float32
# By name, shape and dtype.
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def fill(model: nn.Module, tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]], dtype: torch.dtype) -> None:
    """Gives the model these parameters, with `dtype` in the place of BF16."""
    for name, shape, stored in tensors:
        *path, leaf = name.split(".")
        place = model
        for part in path:
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.register_parameter(leaf, nn.Parameter(torch.empty(shape, dtype=dtype if stored == BF16 else stored)))
