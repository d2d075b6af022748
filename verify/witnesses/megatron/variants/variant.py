"""What a change of Megatron's standard model is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from converters.config.dims import ModelDims


def _nothing(
    dims: ModelDims, config: TransformerConfig, spec: TransformerBlockSubmodules, transformer_engine: bool
) -> None:
    """Leaves the spec as it is."""


@dataclass(frozen=True)
class Variant:
    """`settings` are further values for TransformerConfig; `adapt` changes the layer specs of a rank in place; `finish` changes the
    model that was built. All look at the dimensions first, and do nothing for models that are not of their kind.
    """

    settings: Callable[[ModelDims], Mapping[str, Any]] = lambda dims: {}
    adapt: Callable[[ModelDims, TransformerConfig, TransformerBlockSubmodules, bool], None] = _nothing
    finish: Callable[[ModelDims, GPTModel], None] = lambda dims, model: None
