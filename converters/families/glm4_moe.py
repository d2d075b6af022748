"""GLM-4.5, 4.6 and 4.7, and GLM-4.7-Flash, which has latent attention.

First layers dense, sigmoid router with an fp32 selection bias, shared experts, q/k norms in the large one, one MTP
layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.converters.blocks.decoder import appended_drafts, attention, moe_model, shared_experts_mlp
from ckptkit.converters.blocks.latent_attention import mla_attention, read_mla
from ckptkit.converters.blocks.sigmoid_moe import ABSENT, dense_layers, read_sigmoid_moe
from ckptkit.converters.config.dims import ModelDims, base_dims, first_layers
from ckptkit.converters.config.values import flag, integer
from ckptkit.converters.family import ModelFamily, Release
from ckptkit.converters.rules import ParamMapping


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a glm4_moe config. Source: transformers `Glm4MoeConfig`."""
    return base_dims(
        {"partial_rotary_factor": 0.5, **config},
        qkv_bias=flag(config, "attention_bias", False),
        qk_norm=flag(config, "use_qk_norm", False),
        dense_layers=first_layers(config, "first_k_dense_replace", 1),
        mtp_layers=integer(config, "num_nextn_predict_layers", 0),
        **read_sigmoid_moe(config, {**ABSENT, "routed_scaling_factor": 1.0}),
    )


def read_lite_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a glm4_moe_lite config. Source: transformers `Glm4MoeLiteConfig`."""
    mla = read_mla(config)
    return base_dims(
        config,
        mla=mla,
        head_dim=mla.nope,
        dense_layers=dense_layers(config, (0,)),
        mtp_layers=integer(config, "num_nextn_predict_layers", 0),
        **read_sigmoid_moe(config, ABSENT),
    )


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    return moe_model(dims, mla_attention if dims.mla else attention, shared_experts_mlp)


FAMILIES = (
    ModelFamily(
        ("glm4_moe",),
        ("Glm4MoeForCausalLM",),
        read_dims,
        mappings,
        release=Release(drafts=appended_drafts, classes={"Router": "Glm4MoeTopkRouter"}),
    ),
    ModelFamily(
        ("glm4_moe_lite",),
        ("Glm4MoeLiteForCausalLM",),
        read_lite_dims,
        mappings,
        release=Release(drafts=appended_drafts, classes={"Router": "Glm4MoeLiteTopkRouter"}),
    ),
)
