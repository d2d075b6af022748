"""GLM-4.5."""

from __future__ import annotations

from transformers import Glm4MoeConfig, PretrainedConfig

from families.case import MOE, SIZES, Case


def config() -> PretrainedConfig:
    return Glm4MoeConfig(
        **SIZES,
        **MOE,
        n_routed_experts=12,
        n_shared_experts=1,
        first_k_dense_replace=2,
        use_qk_norm=True,
        attention_bias=True,
        routed_scaling_factor=2.5,
        num_nextn_predict_layers=0,  # newer transformers would promise one
    )


CASES = {"glm4_moe": Case(config, fused=True)}
