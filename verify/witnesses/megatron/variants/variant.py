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
    """A change of Megatron's standard model. Each function does nothing for models that do not need the change.

    `settings` gives further values for TransformerConfig, `adapt` changes the layer specs of a rank in place, and
    `finish` changes the built model.
    """

    settings: Callable[[ModelDims], Mapping[str, Any]] = lambda dims: {}
    adapt: Callable[[ModelDims, TransformerConfig, TransformerBlockSubmodules, bool], None] = _nothing
    finish: Callable[[ModelDims, GPTModel], None] = lambda dims, model: None
