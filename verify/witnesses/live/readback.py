"""The bits of everything that a model holds, and its poison; runs inside an engine's ranks.

Engines' own checkers leave out rotary caches and tensors that are plain attributes of modules, such as the matrices
that latent attention computes after loading. This reads them too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from blake3 import blake3
from torch import Tensor, nn

from ckptkit.storage.buffers import bytes_of
from ckptkit.verify.witnesses.loading.bits import poison

_CACHES = ("kv_cache",)  # attributes with what requests leave


def fill(model: nn.Module, has_default: Callable[[str], bool]) -> None:
    """Poisons every parameter: resumed memory may hold what was there before, and hide what an update leaves out."""
    poison(parameter.detach() for name, parameter in model.named_parameters() if not has_default(name))


def describe_tensors(model: nn.Module) -> dict[str, tuple[str, int]]:
    """Digest and bytes of every parameter, buffer and tensor attribute of every module, by its first name."""
    found: dict[str, tuple[str, int]] = {}
    for prefix, module in model.named_modules():
        own = {**module._parameters, **module._buffers, **vars(module)}
        for name, tensor in own.items():
            if isinstance(tensor, Tensor) and tensor.device.type != "meta" and name not in _CACHES:
                found[f"{prefix}.{name}".lstrip(".")] = describe_tensor(tensor.detach()), tensor.nbytes
    return found


def describe_tensor(tensor: Tensor) -> str:
    """dtype, shape and BLAKE3 of the values in row-major order."""
    values = tensor.contiguous().cpu().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {list(tensor.shape)} {blake3(bytes_of(values)).hexdigest()}"
