"""Qwen3 MoE (30B-A3B, 235B-A22B).

The released ones with experts on every layer, softmax router, q/k norms, no shared expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converters.blocks.decoder import attention, dense_mlp, embeddings, moe_mlp
from converters.config.dims import ModelDims, base_dims, layers_without_experts
from converters.config.values import flag, integer, require_flags, without_windows
from converters.family import QKV_GATE_UP, EngineClass, ModelFamily, Release
from converters.rules import ParamMapping


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a qwen3_moe config. Source: transformers `Qwen3MoeConfig`."""
    without_windows(config)
    require_flags(config, "qwen3_moe", {"attention_bias": False})
    return base_dims(
        config,
        qkv_bias=False,
        qk_norm=True,
        experts=integer(config, "num_experts" if config.get("num_experts") is not None else "num_local_experts"),
        top_k=integer(config, "num_experts_per_tok"),
        expert_ffn=integer(config, "moe_intermediate_size"),
        dense_layers=layers_without_experts(config),
        router_normalize=flag(config, "norm_topk_prob", False),
    )


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of a qwen3_moe model."""
    return (*embeddings(dims), *attention(dims), *dense_mlp(dims), *moe_mlp(dims))


FAMILIES = (
    ModelFamily(
        ("qwen3_moe",),
        ("Qwen3MoeForCausalLM",),
        read_dims,
        mappings,
        release=Release(classes={"Router": "Qwen3MoeTopKRouter"}),
        engines={"sglang": EngineClass(QKV_GATE_UP), "vllm": EngineClass(packs_routers=True)},
    ),
)
