"""ERNIE 4.5 MoE: softmax router that selects with an fp32 bias, shared experts, rope in pairs.

Megatron's router supports such a bias only with sigmoid scores. Megatron-Bridge builds a sigmoid router for these
models, which routes tokens differently from the release's softmax. The first layers are dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.converters.blocks.decoder import attention, dense_mlp, embeddings, moe_mlp
from ckptkit.converters.config.dims import ModelDims, base_dims
from ckptkit.converters.config.values import flag, integer, require
from ckptkit.converters.family import MegatronGap, ModelFamily, Release
from ckptkit.converters.ops.basic import OneRow
from ckptkit.converters.rules import ParamMapping, decoder

_BIAS = "mlp.moe_statics.e_score_correction_bias"


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of an ernie4_5_moe config. Source: transformers `Ernie4_5_MoeConfig`, `Ernie4_5_MoeDecoderLayer`.

    Raises CkptkitError for experts in every other layer, which transformers and SGLang count from different layers.
    """
    require(config, "ernie4_5_moe", {"use_bias": False})
    why = "the releases have 1; for others, transformers and SGLang place the experts in different layers"
    require(config, "ernie4_5_moe", {"moe_layer_interval": 1}, why)
    layers, expert_ffn = integer(config, "num_hidden_layers"), integer(config, "moe_intermediate_size")
    first, last = integer(config, "moe_layer_start_index", 1), integer(config, "moe_layer_end_index", -1)
    routed = range(first, 1 + (layers - 1 if last == -1 else last))
    return base_dims(
        {"rms_norm_eps": 1e-5, **config},
        default_theta=500000.0,
        tied=flag(config, "tie_word_embeddings", True),
        rope_interleaved=True,
        dense_layers=tuple(layer for layer in range(layers) if layer not in routed),
        experts=integer(config, "moe_num_experts"),
        top_k=integer(config, "moe_k"),
        expert_ffn=expert_ffn,
        shared_ffn=expert_ffn * integer(config, "moe_num_shared_experts", 2),
        router_bias=True,
    )


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of the model. Megatron's names: Megatron-Bridge's `models/ernie/ernie_45_bridge.py` at 0fe9cb1."""
    bias = decoder(dims, dims.moe).rule("mlp.router.expert_bias", {_BIAS: (1, dims.experts)}, OneRow(), fp32=True)
    experts = moe_mlp(replace(dims, router_bias=False), shared="shared_experts")
    return (*embeddings(dims), *attention(dims), *dense_mlp(dims), *experts, replace(bias, kind="Router"))


FAMILIES = (
    ModelFamily(
        ("ernie4_5_moe",),
        ("Ernie4_5_MoeForCausalLM",),
        read_dims,
        mappings,
        passthrough=("model.mtp_",),
        release=Release(classes={"Router": "Ernie4_5_MoeTopKRouter"}),
        unwitnessed=MegatronGap(
            "its router adds a bias to softmax scores, Megatron's only to sigmoid scores", "Megatron-Bridge"
        ),
    ),
)
