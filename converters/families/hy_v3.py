"""Hunyuan 3 (Hy3): first layer dense, sigmoid router with an fp32 bias, a shared expert, one MTP layer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ckptkit.converters.blocks.decoder import appended_drafts, attention, moe_mlp, moe_model
from ckptkit.converters.blocks.sigmoid_moe import dense_layers
from ckptkit.converters.config.dims import ModelDims, base_dims, read_experts
from ckptkit.converters.config.values import agreed, integer, number, require
from ckptkit.converters.family import FusedExperts, ModelFamily, Release
from ckptkit.converters.rules import ParamMapping

# Behaviour of transformers, which ignores these keys of the releases.
_ONLY = {
    "attention_bias": False,
    "mlp_bias": False,
    "moe_router_enable_expert_bias": True,
    "moe_router_use_sigmoid": True,
    "qk_norm": True,
    "route_norm": True,
}


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a hy_v3 config. Source: transformers `HYV3Config`, `HYV3TopKRouter`, `HYV3MoE`."""
    require(config, "hy_v3", _ONLY)
    # transformers and SGLang read the first, vLLM the second.
    ffn = agreed(config, ("moe_intermediate_size", "expert_hidden_dim"))
    return base_dims(
        config,
        qk_norm=True,
        default_theta=11158840.0,
        dense_layers=dense_layers(config, (0,)),
        mtp_layers=integer(config, "num_nextn_predict_layers", 0),
        shared_ffn=ffn * integer(config, "num_shared_experts", 1),
        router_sigmoid=True,
        router_bias=True,
        router_scale=number(config, "router_scaling_factor", 2.826),
        **read_experts(config),
    )


_experts = partial(moe_mlp, shared="shared_mlp", router="router.gate", bias="expert_bias")


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    return moe_model(dims, attention, _experts, mtp_norm="final_layernorm")


FAMILIES = (
    ModelFamily(
        ("hy_v3",),
        ("HYV3ForCausalLM",),
        read_dims,
        mappings,
        fused=FusedExperts(renames_tensors=True),
        release=Release(
            drafts=appended_drafts,
            classes={"Router": "HYV3TopKRouter"},
            modules={"mlp.gate": "mlp.router.gate", "mlp.shared_experts": "mlp.shared_mlp"},
        ),
    ),
)
