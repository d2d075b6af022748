"""Runs inside an engine's ranks, as a custom weight loader: writes down the bits of everything that the model holds.

SGLang's own checker leaves out rotary caches and tensors that are plain attributes of modules, such as the matrices
that latent attention computes after loading. This reads them too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor, nn

from ckptkit.storage.buffers import bytes_of
from quant.formats.part_names import WEIGHT_PACKED
from verify.witnesses.loading.bits import poison
from verify.witnesses.sglang.names import has_default

RECORD = "verify.witnesses.sglang.live.readback.record"
POISON = "verify.witnesses.sglang.live.readback.fill"
PACKED = "packed"  # the entry that names modules with packed weights


def record(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Writes `PATH.RANK.CLASS.json`: a digest and the bytes of each tensor, by name.

    PATH is the name of the only tensor that is sent. SGLang calls this in every rank, for a draft model too.
    """
    ((path, _),) = named_tensors
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    found = {name: [described(tensor), tensor.nbytes] for name, tensor in tensors_of(model).items()}
    Path(f"{path}.{rank}.{type(model).__name__}.json").write_text(json.dumps({PACKED: packed(model), "held": found}))


def fill(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Poisons every parameter: resumed memory may hold what was there before, and hide what an update leaves out."""
    poison(parameter.detach() for name, parameter in model.named_parameters() if not has_default(name))


def tensors_of(model: nn.Module) -> Mapping[str, Tensor]:
    """Every parameter, buffer and tensor attribute of every module, by its first name."""
    return dict(_tensors_of(model))


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        own = {**module._parameters, **module._buffers, **vars(module)}
        for name, tensor in own.items():
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                yield f"{prefix}.{name}".lstrip("."), tensor.detach()


def described(tensor: Tensor) -> str:
    """dtype, shape and BLAKE3 of the values in row-major order."""
    values = tensor.contiguous().cpu().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {list(tensor.shape)} {blake3(bytes_of(values)).hexdigest()}"


def packed(model: nn.Module) -> dict[str, str]:
    """Modules with INT4 weights of their own, each with the class of its SGLang scheme."""
    return {
        name: type(getattr(module, "scheme", None)).__name__
        for name, module in model.named_modules()
        if any(own.endswith(WEIGHT_PACKED) for own in module._parameters)
    }
