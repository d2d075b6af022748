"""Families that no released Megatron loads: transformers' own save is the truth of their names, shapes and dtypes."""

from __future__ import annotations

from typing import Any

from transformers import Ernie4_5_MoeConfig, Olmo3Config, OlmoeConfig

from families import deepseek_v4, gemma4
from families.case import SIZES, Case
from families.gqa import as_v4

# A head is hidden_size / num_attention_heads wide.
WITHOUT_HEAD_DIM = {key: value for key, value in SIZES.items() if key != "head_dim"} | {"num_attention_heads": 8}
# As OLMo 3 is released.
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
CASES = {
    "olmoe": Case(
        lambda: OlmoeConfig(
            **WITHOUT_HEAD_DIM | {"intermediate_size": 96, "num_key_value_heads": 8},
            num_experts=12,
            num_experts_per_tok=3,
        ),
        fused=True,
    ),
    "olmo3": Case(lambda: Olmo3Config(**WITHOUT_HEAD_DIM, sliding_window=5, rope_parameters=dict(YARN)), edit=as_v4),
    "olmo3-tied-window-everywhere": Case(
        lambda: Olmo3Config(**WITHOUT_HEAD_DIM, tie_word_embeddings=True, layer_types=["sliding_attention"] * 12),
    ),
    "ernie4_5_moe": Case(
        lambda: Ernie4_5_MoeConfig(
            **SIZES,
            moe_intermediate_size=96,
            moe_num_experts=12,
            moe_k=3,
            moe_layer_start_index=2,
            tie_word_embeddings=True,
        ),
        fused=True,
    ),
    **gemma4.CASES,
    **deepseek_v4.CASES,
}
