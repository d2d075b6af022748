"""GLM-4.5 and 4.6: first layers dense, sigmoid router with an fp32 selection bias, shared experts, q/k norms in the large one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.errors import CkptkitError
from converters.blocks import attention, dense_mlp, embeddings, moe_mlp
from converters.dims import ModelDims, base_dims, need
from converters.rules import ModelFamily, ParamMapping


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a glm4_moe config. Source: transformers `Glm4MoeConfig`."""
    if not config.get("norm_topk_prob", True):
        raise CkptkitError("config.json: glm4_moe with norm_topk_prob false is not supported", "Megatron's sigmoid router always normalizes")
    expert_ffn = int(need(config, "moe_intermediate_size"))
    return base_dims(
        {"partial_rotary_factor": 0.5, **config},
        qkv_bias=bool(config.get("attention_bias", False)),
        qk_norm=bool(config.get("use_qk_norm", False)),
        experts=int(need(config, "n_routed_experts")),
        top_k=int(need(config, "num_experts_per_tok")),
        expert_ffn=expert_ffn,
        shared_ffn=expert_ffn * int(config.get("n_shared_experts", 1)),
        dense_layers=int(config.get("first_k_dense_replace", 1)),
        router_sigmoid=True,
        router_bias=True,
        router_scale=float(config.get("routed_scaling_factor", 1.0)),
        router_groups=int(config.get("n_group", 1)),
        router_top_groups=int(config.get("topk_group", 1)),
    )


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of a glm4_moe model."""
    return (*embeddings(dims), *attention(dims), *dense_mlp(dims), *moe_mlp(dims, shared="shared_experts"))


FAMILY = ModelFamily(("glm4_moe",), read_dims, mappings)
