"""Hunyuan 3 (Hy3): first layer dense, sigmoid router with an fp32 bias beside it, a shared expert, one MTP layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError
from converters.blocks.decoder import (
    appended_drafts,
    attention,
    dense_mlp,
    embeddings,
    moe_mlp,
    mtp_copies,
    multi_token_prediction,
)
from converters.blocks.sigmoid_moe import dense_of_kinds
from converters.config.dims import ModelDims, base_dims, first_layers
from converters.config.values import integer, number, require_flags
from converters.family import EngineClass, FusedExperts, ModelFamily, Release
from converters.rules import NamePrefix, ParamMapping

# What transformers does whatever these keys of the releases say.
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
    require_flags(config, "hy_v3", _ONLY)
    ffn = integer(config, "moe_intermediate_size")
    if integer(config, "expert_hidden_dim", ffn) != ffn:
        raise CkptkitError(
            f"config.json: moe_intermediate_size is {ffn} but expert_hidden_dim says {config['expert_hidden_dim']}",
            "transformers and SGLang read the first, vLLM the second; make them equal",
        )
    return base_dims(
        config,
        qkv_bias=False,
        qk_norm=True,
        default_theta=11158840.0,
        dense_layers=_dense_layers(config),
        mtp_layers=integer(config, "num_nextn_predict_layers", 0),
        experts=integer(config, "num_experts"),
        top_k=integer(config, "num_experts_per_tok"),
        expert_ffn=ffn,
        shared_ffn=ffn * integer(config, "num_shared_experts", 1),
        router_sigmoid=True,
        router_bias=True,
        router_scale=number(config, "router_scaling_factor", 2.826),
    )


def _dense_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The dense layers.

    transformers reads `mlp_layer_types`, or takes the first layer; SGLang and vLLM read `first_k_dense_replace`.
    """
    first, kinds = first_layers(config, "first_k_dense_replace", 1), dense_of_kinds(config)
    dense = (0,) if kinds is None else kinds
    if config.get("first_k_dense_replace") is not None and dense != first:
        raise CkptkitError(
            f"config.json: first_k_dense_replace says {len(first)} dense layers, mlp_layer_types {len(dense)}",
            "SGLang and vLLM read the first; transformers the second, which is 1 where it is absent; make them agree",
        )
    return dense


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of a hy_v3 model."""
    tables = embeddings(
        dims, embed_copies=mtp_copies(dims, "embed_tokens"), head_copies=mtp_copies(dims, "shared_head.head")
    )
    rules = [*tables, *attention(dims), *dense_mlp(dims), *_experts(dims)]
    for depth in range(dims.mtp_layers):
        layer, around = multi_token_prediction(dims, depth, norm="final_layernorm")
        rules += [*around, *attention(dims, layer), *_experts(dims, layer)]
    return tuple(rules)


def _experts(dims: ModelDims, at: NamePrefix | None = None) -> tuple[ParamMapping, ...]:
    return moe_mlp(dims, "shared_mlp", at, router="router.gate", bias="expert_bias")


def _engine_keys(text: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"first_k_dense_replace": len(_dense_layers(text)), "qk_norm": True, "route_norm": True}


FAMILIES = (
    ModelFamily(
        ("hy_v3",),
        ("HYV3ForCausalLM",),
        read_dims,
        mappings,
        fused=FusedExperts(renamed=True),
        release=Release(
            drafts=appended_drafts,
            classes={"Router": "HYV3TopKRouter"},
            modules={"mlp.gate": "mlp.router.gate", "mlp.shared_experts": "mlp.shared_mlp"},
        ),
        engines={"sglang": EngineClass(root=("model.", ".model."), keys=_engine_keys)},
    ),
)
