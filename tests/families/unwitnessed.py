"""Families that no released Megatron loads: transformers' own save is the truth of their names, shapes and dtypes."""

from __future__ import annotations

from transformers import OlmoeConfig

from families.case import SIZES, Case

# A head is hidden_size / num_attention_heads wide.
WITHOUT_HEAD_DIM = {key: value for key, value in SIZES.items() if key != "head_dim"} | {"num_attention_heads": 8}
CASES = {
    "olmoe": Case(
        lambda: OlmoeConfig(
            **WITHOUT_HEAD_DIM | {"intermediate_size": 96, "num_key_value_heads": 8},
            num_experts=12,
            num_experts_per_tok=3,
        ),
        fused=True,
    ),
}
