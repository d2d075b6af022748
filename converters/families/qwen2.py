"""Qwen2 and Qwen2.5: biases on q, k and v, embeddings tied in the small sizes.

Qwen1.5 MoE and Qwen2 57B-A14B have a softmax router that does not renormalize, and one shared expert behind a gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.converters.blocks.decoder import ROTARY_FREQUENCIES, attention, dense_mlp, dense_model, embeddings, moe_mlp
from ckptkit.converters.config.dims import ModelDims, base_dims, layers_without_experts, read_experts
from ckptkit.converters.config.values import flag, integer, without_windows
from ckptkit.converters.family import ModelFamily, Release
from ckptkit.converters.rules import ParamMapping


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a qwen2 config. Source: transformers `Qwen2Config`; q, k and v always have a bias, o never."""
    without_windows(config)
    return base_dims(config, qkv_bias=True)


def read_moe_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a qwen2_moe config. Source: transformers `Qwen2MoeConfig`, `Qwen2MoeSparseMoeBlock`."""
    without_windows(config)
    return base_dims(
        config,
        qkv_bias=flag(config, "qkv_bias", True),
        shared_ffn=integer(config, "shared_expert_intermediate_size"),
        shared_gate=True,
        dense_layers=layers_without_experts(config),
        router_normalize=flag(config, "norm_topk_prob", False),
        **read_experts(config),
    )


def moe_mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    return (*embeddings(dims), *attention(dims), *dense_mlp(dims), *moe_mlp(dims, shared="shared_expert"))


FAMILIES = (
    ModelFamily(("qwen2",), ("Qwen2ForCausalLM",), read_dims, dense_model, passthrough_suffixes=ROTARY_FREQUENCIES),
    ModelFamily(
        ("qwen2_moe",),
        ("Qwen2MoeForCausalLM",),
        read_moe_dims,
        moe_mappings,
        release=Release(classes={"Router": "Qwen2MoeTopKRouter"}),
    ),
)
