"""A change of Megatron's standard model.

Modules of ckptkit that replace a CUDA kernel, or a trainer's layer, have the parameters of a checkpoint and compute
nothing: CK606 compares only the results of megatron-core itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from ckptkit.converters.config.dims import ModelDims

BlockSpec: TypeAlias = TransformerBlockSubmodules  # the specs of a rank's layers


def not_computed(module: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """The `forward` of a module that only holds parameters."""
    raise NotImplementedError(f"{type(module).__name__} holds parameters and computes nothing")


class WholeLinear(torch.nn.Module):
    """The weight of a linear layer of Transformer Engine that every tensor parallel rank holds completely."""

    forward = not_computed

    def __init__(self, size_in: int, size_out: int, *, config: TransformerConfig, **ignored: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size_out, size_in, dtype=config.params_dtype))


@dataclass(frozen=True)
class Variant:
    """A change of Megatron's standard model. Each function does nothing for models that do not need the change."""

    settings: Callable[[ModelDims], Mapping[str, Any]] = lambda dims: {}  # further values for TransformerConfig
    # Changes the layer specs of a rank in place.
    adapt: Callable[[ModelDims, TransformerConfig, BlockSpec, bool], None] = lambda *_: None
    finish: Callable[[ModelDims, GPTModel], None] = lambda dims, model: None  # changes the built model
