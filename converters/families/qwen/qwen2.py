"""Qwen2 and Qwen2.5, dense: biases on q, k and v, embeddings tied in the small sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converters.blocks.decoder import ROTARY_FREQUENCIES, dense_model
from converters.config.dims import ModelDims, base_dims
from converters.config.values import without_windows
from converters.family import ModelFamily


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a qwen2 config. Source: transformers `Qwen2Config`; q, k and v always have a bias, o never."""
    without_windows(config)
    return base_dims(config, qkv_bias=True, qk_norm=False)


FAMILIES = (
    ModelFamily(
        ("qwen2",),
        ("Qwen2ForCausalLM",),
        read_dims,
        dense_model,
        carried_ends=ROTARY_FREQUENCIES,
    ),
)
