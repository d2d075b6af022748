"""GLM-4-0414 (9B, 32B, Z1), dense.

Norms also after attention and MLP, rotary in pairs over half of a head, gate and up in one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.converters.blocks.decoder import attention, embeddings, mlp_in_one
from ckptkit.converters.config.dims import ModelDims, base_dims
from ckptkit.converters.config.values import flag
from ckptkit.converters.family import ModelFamily
from ckptkit.converters.rules import ParamMapping, decoder


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a glm4 config. Source: transformers `Glm4Config`, `Glm4DecoderLayer`; o never has a bias."""
    return base_dims(
        {"partial_rotary_factor": 0.5, **config},
        qkv_bias=flag(config, "attention_bias", True),
        rope_interleaved=True,
        sandwich="layer",
    )


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of a glm4 model. The norms after attention and MLP have the names of slime's patch of Megatron-LM."""
    at, norm = decoder(dims, dims.all_layers), (dims.hidden,)
    return (
        *embeddings(dims),
        *attention(dims),
        at.rule("post_self_attn_layernorm.weight", {"post_self_attn_layernorm.weight": norm}),
        *mlp_in_one(dims, at),
        at.rule("post_mlp_layernorm.weight", {"post_mlp_layernorm.weight": norm}),
    )


FAMILIES = (ModelFamily(("glm4",), ("Glm4ForCausalLM",), read_dims, mappings),)
