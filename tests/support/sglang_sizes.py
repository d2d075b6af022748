"""Test models in sizes that groups and blocks of 128 and the tiles of SGLang's INT4 kernels divide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from families import HF_CASES
from families.case import Case
from transformers import PretrainedConfig

# Inputs and outputs of every matrix that is quantized are multiples of 128, but for the 192 outputs that compress keys
# and values in latent attention, and, as in the releases, for what one number a head is computed with.
ATTENTION = {"num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 32}
MLP = {"intermediate_size": 384, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 128}
LINEAR_ATTENTION = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LATENT = {
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 128,
    "v_head_dim": 64,
}
MIXERS = {
    "mamba_num_heads": 16,
    "mamba_head_dim": 24,
    "n_groups": 8,
    "ssm_state_size": 16,
    "moe_shared_expert_intermediate_size": 128,
    "moe_latent_size": 128,
}
# Hidden size divided by heads, which these classes or their config files take for a head's size.
HEADS_OF_16 = {"num_attention_heads": 8, "num_key_value_heads": 8}
HEADS_OF_64 = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
OWN: Mapping[str, Mapping[str, int]] = {
    "llama": HEADS_OF_64,
    "llama-tied": HEADS_OF_16 | {"head_dim": 16},
    "llama-biases": HEADS_OF_16 | {"head_dim": 16},
    "qwen2-tied": HEADS_OF_16 | {"head_dim": 16},
    "qwen2-untied": HEADS_OF_16 | {"head_dim": 16},
    "qwen2_moe": HEADS_OF_16 | {"head_dim": 16},
    "qwen2_moe-dense-between": HEADS_OF_16 | {"head_dim": 16},
    "gemma3_text": HEADS_OF_64,
    "gemma3_text-v4": HEADS_OF_64,
    "qwen2_5_vl": HEADS_OF_16,
    "qwen2_5_vl-tied-as-released": HEADS_OF_16,
    "olmoe": HEADS_OF_16,
    "deepseek_v4": {"q_lora_rank": 128, "o_lora_rank": 128},  # all queries share one key
    # In these classes it is the size of an expert.
    "minimax_m2": ATTENTION | {"intermediate_size": 256},
    "nemotron_h": ATTENTION | MIXERS,
    "nemotron_h-latent": ATTENTION | MIXERS,
    "gpt_oss": ATTENTION | {"intermediate_size": 256},
    "gpt_oss-v4": ATTENTION | {"intermediate_size": 256},
}


def widened(name: str) -> Case:
    """The test model with these sizes; those that its config does not have, or has as None, stay away."""
    case = HF_CASES[name]

    def config() -> PretrainedConfig:
        whole = case.config()
        text = getattr(whole, "text_config", whole)
        for key, size in sizes_of(name, text).items():
            if getattr(text, key, None) is not None:
                setattr(text, key, size)
        return whole

    return replace(case, config=config)


def sizes_of(name: str, text: Any) -> Mapping[str, int]:
    """The sizes for a model's text config."""
    attention = LATENT if hasattr(text, "kv_lora_rank") else OWN.get(name, ATTENTION)
    return MLP | LINEAR_ATTENTION | attention
