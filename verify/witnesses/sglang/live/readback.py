"""Custom weight loaders that run in an engine's ranks: they write digests of all tensors of the model, or poison it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ckptkit.quant.formats.part_names import WEIGHT_PACKED
from ckptkit.verify.witnesses.live import readback
from ckptkit.verify.witnesses.sglang.facts import SGLANG

RECORD = "ckptkit.verify.witnesses.sglang.live.readback.record"
POISON = "ckptkit.verify.witnesses.sglang.live.readback.fill"
PACKED = "packed"  # the entry that names modules with packed weights


def record(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Writes digests and bytes of all tensors into `PATH.RANK.CLASS.json`, in every rank, for a draft model too."""
    ((path, _),) = named_tensors  # the name of the only tensor that is sent
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    contents = {PACKED: packed(model), "held": readback.describe_tensors(model)}
    Path(f"{path}.{rank}.{type(model).__name__}.json").write_text(json.dumps(contents))


def fill(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Poisons every parameter (see `live.readback.fill`)."""
    readback.fill(model, SGLANG.has_default)


def packed(model: nn.Module) -> dict[str, str]:
    """Modules with their own INT4 weights, each with the class of its SGLang scheme."""
    return {
        name: type(getattr(module, "scheme", None)).__name__
        for name, module in model.named_modules()
        if any(own.endswith(WEIGHT_PACKED) for own in module._parameters)
    }
