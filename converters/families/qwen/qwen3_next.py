"""Qwen3-Next: linear attention (gated delta net) in three of four layers, gated attention, experts, one MTP layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converters.blocks.decoder import attention, embeddings, moe_mlp
from converters.blocks.linear_attention import (
    SGLANG_DENSE,
    gated_delta_net,
    hf_linear_attention,
    qwen_mtp,
    qwen_next_drafts,
    read_linear_attention,
    read_mtp_layers,
    refuse_unsupported,
    sglang_keys,
)
from converters.config.dims import ModelDims, base_dims
from converters.config.values import flag, integer
from converters.family import QKV_GATE_UP, EngineClass, ModelFamily, Release
from converters.rules import ParamMapping


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a qwen3_next config. Source: transformers `Qwen3NextConfig`.

    The releases have an MTP layer and no key that says so; a config for weights without it must say
    `mtp_num_hidden_layers` 0.
    """
    refuse_unsupported(config)
    linear = read_linear_attention(config)
    return base_dims(
        {"head_dim": 256, "partial_rotary_factor": 0.25, **config},
        qkv_bias=False,
        qk_norm=True,
        attention_gate=True,
        norm_offset=True,
        linear=linear,
        mtp_layers=read_mtp_layers(config, linear, 1),
        experts=integer(config, "num_experts"),
        top_k=integer(config, "num_experts_per_tok"),
        expert_ffn=integer(config, "moe_intermediate_size"),
        shared_ffn=integer(config, "shared_expert_intermediate_size"),
        shared_gate=True,
        router_normalize=flag(config, "norm_topk_prob", True),
    )


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of a qwen3_next model."""
    return (*gated_delta_net(dims, by_key_head=True), *_all_but_linear_attention(dims))


def slime_mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of a qwen3_next model in slime, whose linear attention is the HF module."""
    return (*hf_linear_attention(dims, by_key_head=True), *_all_but_linear_attention(dims))


def _all_but_linear_attention(dims: ModelDims) -> tuple[ParamMapping, ...]:
    rules = [*embeddings(dims), *attention(dims), *moe_mlp(dims, "shared_expert")]
    if dims.mtp_layers:
        layer, around = qwen_mtp(dims)
        rules += [*around, *attention(dims, layer), *moe_mlp(dims, "shared_expert", layer)]
    return tuple(rules)


FAMILIES = (
    ModelFamily(
        ("qwen3_next",),
        ("Qwen3NextForCausalLM",),
        read_dims,
        mappings,
        {"slime": slime_mappings},
        release=Release(drafts=qwen_next_drafts, classes={"Router": "Qwen3NextTopKRouter"}),
        engines={"sglang": EngineClass(QKV_GATE_UP, dense=SGLANG_DENSE, keys=sglang_keys)},
    ),
)
