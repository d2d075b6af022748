"""DeepSeek V3 and R1, Moonlight, Kimi K2.

Latent attention, first layers dense, experts chosen by groups, one MTP layer in DeepSeek's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converters.blocks.decoder import (
    ROTARY_FREQUENCIES,
    appended_drafts,
    dense_mlp,
    embeddings,
    moe_mlp,
    mtp_copies,
    multi_token_prediction,
)
from converters.blocks.latent_attention import SGLANG_DENSE, mla_attention, read_mla
from converters.blocks.sigmoid_moe import read_sigmoid_moe
from converters.config.dims import ModelDims, base_dims, first_layers
from converters.config.values import integer
from converters.family import EngineClass, ModelFamily, Release, these
from converters.rules import ParamMapping


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


# Kimi K2 Thinking, whose config.json calls it a DeepSeek V3.
PUBLISHED_IGNORE = frozenset(
    {"lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"}
)
RELEASE = Release(
    drafts=appended_drafts,
    published_ignore=(PUBLISHED_IGNORE,),
    model_type="deepseek_v3",
    classes={"Router": "DeepseekV3TopkRouter"},
)
SGLANG = EngineClass(
    ("fused_qkv_a_proj_with_mqa",),
    dense=SGLANG_DENSE,
    keys=these(topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1),
)
FAMILIES = (
    ModelFamily(
        ("deepseek_v3", "kimi_k2"),
        ("DeepseekV3ForCausalLM",),
        read_dims,
        mappings,
        carried_ends=ROTARY_FREQUENCIES,
        release=RELEASE,
        engines={"sglang": SGLANG},
    ),
)
