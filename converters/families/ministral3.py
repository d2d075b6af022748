"""Ministral 3: dense, YaRN, queries scaled by their position beyond the length that YaRN starts from.

megatron-core has no such scale: up to that length (16,384 tokens in the releases) it computes the same model, beyond it
another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError
from converters.blocks.decoder import dense_model
from converters.config.dims import ModelDims, base_dims
from converters.config.values import integer, number, rope_of
from converters.family import EngineClass, ModelFamily


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a ministral3 config. Source: transformers `Ministral3Config`, `get_llama_4_attn_scale`."""
    if config.get("sliding_window") is not None:
        raise CkptkitError(
            "config.json: ministral3 with sliding_window is not supported",
            "no released model uses it",
            code="unsupported",
        )
    rope = rope_of(config)
    scaled = number(rope, "llama_4_scaling_beta") != 0
    absent: dict[str, Any] = {"head_dim": 128, "rms_norm_eps": 1e-5}
    return base_dims(
        {**absent, **config},
        qkv_bias=False,
        qk_norm=False,
        query_scale_from=integer(rope, "original_max_position_embeddings") if scaled else None,
    )


FAMILIES = (
    ModelFamily(
        ("ministral3",),
        ("Ministral3ForCausalLM",),
        read_dims,
        dense_model,
        engines={"sglang": EngineClass(fp8_blocks=False)},
    ),
)
