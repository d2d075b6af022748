"""Llama 2 to 3.3 and models of their architecture.

Dense, embeddings tied in the small Llama 3.2, rope scaled from 3.1 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.converters.blocks.decoder import ROTARY_FREQUENCIES, dense_model
from ckptkit.converters.config.dims import ModelDims, base_dims
from ckptkit.converters.config.values import flag, unsupported
from ckptkit.converters.family import ModelFamily


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a llama config.

    Source: transformers `LlamaConfig`, `LlamaAttention` (one switch for q, k, v and o), `LlamaMLP`.
    """
    attention_bias, mlp_bias = flag(config, "attention_bias", False), flag(config, "mlp_bias", False)
    if attention_bias != mlp_bias:
        with_bias, without = ("attention_bias", "mlp_bias") if attention_bias else ("mlp_bias", "attention_bias")
        raise unsupported(
            f"llama with {with_bias} but without {without}",
            "Megatron has one switch for the biases of o_proj and MLP (--disable-bias-linear)",
        )
    return base_dims(config, qkv_bias=attention_bias, out_bias=attention_bias, mlp_bias=mlp_bias)


FAMILIES = (
    ModelFamily(
        ("llama",),
        ("LlamaForCausalLM", "LLaMAForCausalLM"),
        read_dims,
        dense_model,
        passthrough_suffixes=ROTARY_FREQUENCIES,
    ),
)
