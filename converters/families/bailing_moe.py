"""Ling 2.0 and Ring 2.0 (Bailing MoE V2): first layers dense, q, k and v in one matrix, rotary over half of a head.

Sigmoid router with groups and an fp32 selection bias, a shared expert, and where the config says so an MTP layer.
transformers has no such class; the published modeling code computes what its GLM-4.5 does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from converters.blocks.decoder import (
    dense_mlp,
    embeddings,
    moe_mlp,
    mtp_copies,
    multi_token_prediction,
)
from converters.blocks.sigmoid_moe import read_sigmoid_moe
from converters.config.dims import ModelDims, base_dims, first_layers
from converters.config.values import integer, require_flags, without_windows
from converters.family import ModelFamily
from converters.ops.basic import Copy, QkvInOne
from converters.rules import NamePrefix, ParamMapping, decoder

# What the published modeling code does whatever these keys say.
_ONLY = {
    "moe_router_enable_expert_bias": True,
    "norm_head": False,
    "norm_softmax": False,
    "use_bias": False,
    "use_qkv_bias": False,
}


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a Bailing MoE V2 config. Source: the published `BailingMoeV2Config` and `BailingMoeV2SparseMoeBlock`."""
    without_windows(config)
    require_flags(config, "bailing_moe", _ONLY)
    if config.get("use_qk_norm") is not True:
        raise CkptkitError(
            f"config.json: bailing_moe with use_qk_norm {shortened(config.get('use_qk_norm'))} is not supported",
            "all releases have it true; where it is absent, the published code has the norms and SGLang has not",
            code="unsupported",
        )
    counts = {"n_routed_experts": integer(config, "num_experts")}
    counts |= {"n_shared_experts": integer(config, "num_shared_experts")}
    absent = {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
    routed = read_sigmoid_moe({**config, **counts, "scoring_func": config.get("score_function")}, absent)
    ffn = routed["expert_ffn"]
    shared = integer(config, "moe_shared_expert_intermediate_size", ffn)
    if shared != ffn:
        raise CkptkitError(
            f"config.json: moe_shared_expert_intermediate_size is {shared}, moe_intermediate_size {ffn}",
            "SGLang takes the first for a shared expert, the published code the second; make them equal",
        )
    return base_dims(
        config,
        qkv_bias=False,
        qk_norm=True,
        default_theta=600000.0,
        dense_layers=first_layers(config, "first_k_dense_replace", 0),
        mtp_layers=integer(config, "num_nextn_predict_layers", 0),
        **routed,
    )


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of a Bailing MoE V2 model."""
    copies = {"embed_copies": mtp_copies(dims, "embed_tokens"), "head_copies": mtp_copies(dims, "shared_head.head")}
    tables = embeddings(dims, name="word_embeddings", **copies)
    rules = [*tables, *_attention(dims, decoder(dims, dims.all_layers)), *dense_mlp(dims), *_experts(dims)]
    for depth in range(dims.mtp_layers):
        layer, around = multi_token_prediction(dims, depth, norm="final_layernorm")
        rules += [*around, *_attention(dims, layer), *_experts(dims, layer)]
    return tuple(rules)


def _experts(dims: ModelDims, at: NamePrefix | None = None) -> tuple[ParamMapping, ...]:
    return moe_mlp(dims, "shared_experts", at, bias="gate.expert_bias")


def _attention(dims: ModelDims, at: NamePrefix) -> tuple[ParamMapping, ...]:
    heads, groups = dims.heads * dims.head_dim, dims.groups * dims.head_dim
    norms = {"q": "query", "k": "key"}
    return (
        at.rule("self_attention.linear_qkv.layer_norm_weight", {"input_layernorm.weight": (dims.hidden,)}),
        at.rule(
            "self_attention.linear_qkv.weight",
            {"attention.query_key_value.weight": (heads + 2 * groups, dims.hidden)},
            QkvInOne(dims.heads, dims.groups, dims.head_dim),
        ),
        at.rule("self_attention.linear_proj.weight", {"attention.dense.weight": (dims.hidden, heads)}, Copy(1)),
        *(
            at.rule(
                f"self_attention.{short}_layernorm.weight", {f"attention.{name}_layernorm.weight": (dims.head_dim,)}
            )
            for short, name in norms.items()
        ),
    )


FAMILIES = (
    ModelFamily(
        ("bailing_moe", "bailing_moe_v2"),
        ("BailingMoeV2ForCausalLM",),
        read_dims,
        mappings,
        release=None,  # no INT4: transformers has no class to hold the list of Linear layers against
    ),
)
