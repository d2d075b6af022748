"""Ling 2.0 and Ring 2.0 (Bailing MoE V2): first layers dense, q, k and v in one matrix, rotary over half of a head.

Sigmoid router with groups and an fp32 selection bias, a shared expert, and optionally an MTP layer.
transformers has no such class; the published modeling code computes what its GLM-4.5 does.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ckptkit.converters.blocks.decoder import attention, moe_mlp, moe_model
from ckptkit.converters.blocks.sigmoid_moe import read_sigmoid_moe
from ckptkit.converters.config.dims import ModelDims, base_dims, first_layers
from ckptkit.converters.config.values import agreed, integer, require, without_windows
from ckptkit.converters.family import ModelFamily
from ckptkit.converters.rules import ParamMapping

# Behaviour of the published modeling code, which ignores these keys.
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
    require(config, "bailing_moe", _ONLY)
    # If the key is absent, the published code has the norms but SGLang does not.
    require({"use_qk_norm": None, **config}, "bailing_moe", {"use_qk_norm": True}, strict=True)
    counts = {"n_routed_experts": integer(config, "num_experts")}
    counts |= {"n_shared_experts": integer(config, "num_shared_experts")}
    absent = {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
    routed = read_sigmoid_moe({**config, **counts, "scoring_func": config.get("score_function")}, absent)
    agreed(config, ("moe_intermediate_size", "moe_shared_expert_intermediate_size"))
    return base_dims(
        config,
        qk_norm=True,
        default_theta=600000.0,
        dense_layers=first_layers(config, "first_k_dense_replace", 0),
        mtp_layers=integer(config, "num_nextn_predict_layers", 0),
        **routed,
    )


_attention = partial(
    attention,
    block="attention.",
    joined="query_key_value",
    out="dense",
    head_norms=("query_layernorm", "key_layernorm"),
)
_experts = partial(moe_mlp, shared="shared_experts", bias="gate.expert_bias")


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    return moe_model(dims, _attention, _experts, embedding="word_embeddings", mtp_norm="final_layernorm")


FAMILIES = (
    ModelFamily(
        ("bailing_moe", "bailing_moe_v2"),
        ("BailingMoeV2ForCausalLM",),
        read_dims,
        mappings,
        release=None,  # no INT4: transformers has no class to compare the list of Linear layers with
    ),
)
