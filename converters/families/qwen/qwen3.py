"""Qwen3, dense (0.6B to 32B): q/k norms, no biases, embeddings tied in the small sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError
from converters.blocks.decoder import dense_model
from converters.config.dims import ModelDims, base_dims
from converters.config.values import flag, integer, without_windows
from converters.family import ModelFamily


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a qwen3 config. Source: transformers `Qwen3Config`, whose heads are 128 wide where nothing is said."""
    without_windows(config)
    if flag(config, "attention_bias", False):
        raise CkptkitError(
            "config.json: qwen3 with attention_bias is not supported",
            "Megatron has no bias on o_proj without biases in the MLP",
            code="unsupported",
        )
    return base_dims({**config, "head_dim": integer(config, "head_dim", 128)}, qkv_bias=False, qk_norm=True)


FAMILIES = (ModelFamily(("qwen3",), ("Qwen3ForCausalLM",), read_dims, dense_model),)
