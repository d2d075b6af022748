"""What a change of Megatron's standard model is made of.

A module of ours that takes the place of a CUDA kernel, or of a layer that a trainer brings, has the parameters that a
checkpoint is loaded into, and computes nothing: CK606 compares what megatron-core itself computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from ckptkit.converters.config.dims import ModelDims


def _nothing(
    dims: ModelDims, config: TransformerConfig, spec: TransformerBlockSubmodules, transformer_engine: bool
) -> None:
    """Leaves the spec as it is."""


def not_computed(module: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """The `forward` of a module that only holds parameters."""
    raise NotImplementedError(f"{type(module).__name__} holds parameters and computes nothing")


class WholeLinear(torch.nn.Module):
    """The weight of a linear layer of Transformer Engine's that every tensor parallel rank holds whole."""

    forward = not_computed

    def __init__(self, size_in: int, size_out: int, *, config: TransformerConfig, **ignored: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(size_out, size_in, dtype=config.params_dtype))


@dataclass(frozen=True)
class Variant:
    """A change of Megatron's standard model. Each function does nothing for models that do not need the change.

    `settings` gives further values for TransformerConfig, `adapt` changes the layer specs of a rank in place, and
    `finish` changes the built model.
    """

    settings: Callable[[ModelDims], Mapping[str, Any]] = lambda dims: {}
    adapt: Callable[[ModelDims, TransformerConfig, TransformerBlockSubmodules, bool], None] = _nothing
    finish: Callable[[ModelDims, GPTModel], None] = lambda dims, model: None
