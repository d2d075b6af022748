"""GLM-4.5, 4.6 and 4.7: first layers dense, sigmoid router with an fp32 selection bias, shared experts, q/k norms in the large one, one MTP layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.errors import CkptkitError
from converters.blocks import attention, dense_mlp, embeddings, moe_mlp, mtp_copies, multi_token_prediction
from converters.config_values import flag, integer, number
from converters.dims import ModelDims, base_dims, first_layers
from converters.rules import ModelFamily, ParamMapping


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a glm4_moe config. Source: transformers `Glm4MoeConfig`."""
    if not flag(config, "norm_topk_prob", True):
        raise CkptkitError("config.json: glm4_moe with norm_topk_prob false is not supported", "Megatron's sigmoid router always normalizes")
    shared = integer(config, "n_shared_experts", 1)
    if shared < 1:
        raise CkptkitError("config.json: glm4_moe without shared experts is not supported", "no released model is without one")
    expert_ffn = integer(config, "moe_intermediate_size")
    return base_dims(
        {"partial_rotary_factor": 0.5, **config},
        qkv_bias=flag(config, "attention_bias", False),
        qk_norm=flag(config, "use_qk_norm", False),
        experts=integer(config, "n_routed_experts"),
        top_k=integer(config, "num_experts_per_tok"),
        expert_ffn=expert_ffn,
        shared_ffn=expert_ffn * shared,
        dense_layers=first_layers(config, "first_k_dense_replace", 1),
        mtp_layers=integer(config, "num_nextn_predict_layers", 0),
        router_sigmoid=True,
        router_bias=True,
        router_scale=number(config, "routed_scaling_factor", 1.0),
        router_groups=integer(config, "n_group", 1),
        router_top_groups=integer(config, "topk_group", 1),
    )


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of a glm4_moe model."""
    tables = embeddings(dims, embed_copies=mtp_copies(dims, "embed_tokens"), head_copies=mtp_copies(dims, "shared_head.head"))
    rules = [*tables, *attention(dims), *dense_mlp(dims), *moe_mlp(dims, "shared_experts")]
    for depth in range(dims.mtp_layers):
        layer, around = multi_token_prediction(dims, depth)
        rules += [*around, *attention(dims, layer), *moe_mlp(dims, "shared_experts", layer)]
    return tuple(rules)


FAMILY = ModelFamily(("glm4_moe",), read_dims, mappings)
