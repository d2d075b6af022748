"""Qwen3-Next: linear attention (gated delta net) in three of four layers, gated attention, experts, one MTP layer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from converters.blocks.linear_attention import (
    SGLANG_DENSE,
    linear_model,
    qwen_next_drafts,
    read_linear_attention,
    read_mtp_layers,
    refuse_unsupported,
    sglang_keys,
    slime_linear_model,
)
from converters.config.dims import ModelDims, base_dims, read_experts
from converters.config.values import flag, integer
from converters.family import QKV_GATE_UP, EngineClass, ModelFamily, Release


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a qwen3_next config. Source: transformers `Qwen3NextConfig`.

    The releases have an MTP layer and no key that says so; a config for weights without it must say
    `mtp_num_hidden_layers` 0.
    """
    refuse_unsupported(config)
    linear = read_linear_attention(config)
    return base_dims(
        {"head_dim": 256, "partial_rotary_factor": 0.25, **config},
        qk_norm=True,
        attention_gate=True,
        norm_offset=True,
        linear=linear,
        mtp_layers=read_mtp_layers(config, linear, 1),
        shared_ffn=integer(config, "shared_expert_intermediate_size"),
        shared_gate=True,
        router_normalize=flag(config, "norm_topk_prob", True),
        **read_experts(config),
    )


FAMILIES = (
    ModelFamily(
        ("qwen3_next",),
        ("Qwen3NextForCausalLM",),
        read_dims,
        partial(linear_model, by_key_head=True),
        {"slime": partial(slime_linear_model, by_key_head=True)},
        release=Release(drafts=qwen_next_drafts, classes={"Router": "Qwen3NextTopKRouter"}),
        engines={"sglang": EngineClass(QKV_GATE_UP, dense=SGLANG_DENSE, keys=sglang_keys)},
    ),
)
