"""Mistral 7B, Nemo 12B and models of their architecture.

Dense, in the first 7B with a sliding window on every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.core.errors import CkptkitError
from converters.blocks.decoder import ROTARY_FREQUENCIES, dense_model
from converters.config.dims import ModelDims, base_dims
from converters.config.values import window_of
from converters.family import EngineClass, ModelFamily


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a mistral config. Source: transformers `MistralConfig`, whose window is 4096 where the key is absent."""
    if config.get("layer_types") is not None:
        raise CkptkitError(
            "config.json: mistral with layer_types is not supported",
            "attention that differs by layer makes it a ministral model",
            code="unsupported",
        )
    dims = base_dims(config, qkv_bias=False, qk_norm=False, window=window_of(config, absent=4096))
    return replace(dims, window_layers=dims.all_layers) if dims.window else dims


FAMILIES = (
    ModelFamily(
        ("mistral",),
        ("MistralForCausalLM",),
        read_dims,
        dense_model,
        carried_ends=ROTARY_FREQUENCIES,
        engines={"sglang": EngineClass(fp8_blocks=False)},
    ),
)
