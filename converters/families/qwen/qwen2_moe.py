"""Qwen1.5 MoE and Qwen2 57B-A14B.

Biases on q, k and v, softmax router that does not renormalize, one shared expert behind a gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converters.blocks.decoder import attention, dense_mlp, embeddings, moe_mlp
from converters.config.dims import ModelDims, base_dims, layers_without_experts
from converters.config.values import flag, integer, without_windows
from converters.family import ModelFamily, Release
from converters.rules import ParamMapping


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a qwen2_moe config. Source: transformers `Qwen2MoeConfig`, `Qwen2MoeSparseMoeBlock`."""
    without_windows(config)
    return base_dims(
        config,
        qkv_bias=flag(config, "qkv_bias", True),
        qk_norm=False,
        experts=integer(config, "num_experts"),
        top_k=integer(config, "num_experts_per_tok"),
        expert_ffn=integer(config, "moe_intermediate_size"),
        shared_ffn=integer(config, "shared_expert_intermediate_size"),
        shared_gate=True,
        dense_layers=layers_without_experts(config),
        router_normalize=flag(config, "norm_topk_prob", False),
    )


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of a qwen2_moe model."""
    return (*embeddings(dims), *attention(dims), *dense_mlp(dims), *moe_mlp(dims, "shared_expert"))


FAMILIES = (
    ModelFamily(
        ("qwen2_moe",),
        ("Qwen2MoeForCausalLM",),
        read_dims,
        mappings,
        release=Release(classes={"Router": "Qwen2MoeTopKRouter"}),
    ),
)
