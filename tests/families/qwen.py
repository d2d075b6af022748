"""Qwen2 and Qwen3 MoE."""

from __future__ import annotations

from transformers import Qwen2Config, Qwen3MoeConfig

from families.case import MOE, SIZES, Case

CASES = {
    "qwen2-tied": Case(lambda: Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen2-untied": Case(lambda: Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "qwen3_moe": Case(lambda: Qwen3MoeConfig(**SIZES, **MOE, num_experts=12, norm_topk_prob=True), fused=True),
}
