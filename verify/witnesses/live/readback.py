"""Reads or poisons all tensors of a model inside an engine's ranks, also those that engines' own checkers omit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from blake3 import blake3
from torch import Tensor, nn

from ckptkit.storage.buffers import bytes_of
from ckptkit.verify.witnesses.loading.bits import poison


def fill(model: nn.Module, has_default: Callable[[str], bool]) -> None:
    """Poisons every parameter: resumed memory may hold its former values, and hide tensors without an update."""
    poison(parameter.detach() for name, parameter in model.named_parameters() if not has_default(name))


def describe_tensors(model: nn.Module) -> dict[str, tuple[str, int]]:
    """Digest and bytes of every parameter, buffer and tensor attribute of every module, by its first name."""
    described: dict[str, tuple[str, int]] = {}
    for prefix, module in model.named_modules():
        for name, tensor in {**module._parameters, **module._buffers, **vars(module)}.items():
            if isinstance(tensor, Tensor) and tensor.device.type != "meta" and name != "kv_cache":  # requests change it
                values = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
                digest = f"{tensor.dtype} {list(tensor.shape)} {blake3(bytes_of(values)).hexdigest()}"
                described[f"{prefix}.{name}".lstrip(".")] = digest, tensor.nbytes
    return described
