"""DeepSeek V3 and R1, Moonlight, Kimi K2: latent attention, first layers dense, experts chosen by groups, one MTP layer in DeepSeek's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converters.blocks.decoder import (
    ROTARY_FREQUENCIES,
    dense_mlp,
    embeddings,
    moe_mlp,
    mtp_copies,
    multi_token_prediction,
)
from converters.blocks.latent_attention import mla_attention, read_mla
from converters.blocks.sigmoid_moe import read_sigmoid_moe
from converters.config.dims import ModelDims, base_dims, first_layers
from converters.config.values import integer
from converters.rules import ModelFamily, ParamMapping


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a deepseek_v3 or kimi_k2 config. Source: transformers `DeepseekV3Config`."""
    mla = read_mla(config)
    return base_dims(
        config,
        qkv_bias=False,
        qk_norm=False,
        mla=mla,
        head_dim=mla.nope,
        dense_layers=first_layers(config, "first_k_dense_replace", integer(config, "first_k_dense_replace")),
        mtp_layers=integer(config, "num_nextn_predict_layers", 0),
        **read_sigmoid_moe(config, absent={}),
    )


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of a model with latent attention and shared experts."""
    tables = embeddings(
        dims, embed_copies=mtp_copies(dims, "embed_tokens"), head_copies=mtp_copies(dims, "shared_head.head")
    )
    rules = [*tables, *mla_attention(dims), *dense_mlp(dims), *moe_mlp(dims, "shared_experts")]
    for depth in range(dims.mtp_layers):
        layer, around = multi_token_prediction(dims, depth)
        rules += [*around, *mla_attention(dims, layer), *moe_mlp(dims, "shared_experts", layer)]
    return tuple(rules)


FAMILY = ModelFamily(
    ("deepseek_v3", "kimi_k2"), ("DeepseekV3ForCausalLM",), read_dims, mappings, carried_ends=ROTARY_FREQUENCIES
)
