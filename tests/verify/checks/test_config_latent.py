"""Arguments of released models with latent attention, as slime's scripts pass them, against the published configs."""

from __future__ import annotations

from typing import Any

import pytest

from converters.megatron.arguments import megatron_args
from converters.megatron.flags import launch_flags
from converters.planner import dims_of
from verify.checks.config.arguments import hint_of, mismatches

Config = dict[str, Any]

DEEPSEEK_V3: Config = {
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2: Config = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
MOONLIGHT: Config = DEEPSEEK_V3 | {
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "vocab_size": 163840,
}
GLM_47_FLASH: Config = {
    "model_type": "glm4_moe_lite",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}

COMMON: Config = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "moe_router_pre_softmax": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    # What Megatron-LM stores of flags that are not given.
    "group_query_attention": False,
    "num_query_groups": 1,
    "rope_type": None,
    "rotary_scaling_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}
ARGS_DEEPSEEK_V3: Config = COMMON | {
    "num_layers": 61,
    "hidden_size": 7168,
    "ffn_hidden_size": 18432,
    "num_attention_heads": 128,
    "kv_channels": 128,
    "norm_epsilon": 1e-6,
    "vocab_size": 129280,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rotary_scaling_factor": 40,
    "rotary_base": 10000,
    "mscale_all_dim": 1.0,
    "num_experts": 256,
    "moe_layer_freq": [0] * 3 + [1] * 58,
    "moe_ffn_hidden_size": 2048,
    "moe_router_topk": 8,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_router_group_topk": 4,
    "moe_router_num_groups": 8,
    "moe_router_topk_scaling_factor": 2.5,
}
ARGS_KIMI_K2: Config = ARGS_DEEPSEEK_V3 | {
    "num_attention_heads": 64,
    "kv_channels": 64,
    "vocab_size": 163840,
    "rotary_scaling_factor": 32.0,
    "rotary_base": 50000,
    "num_experts": 384,
    "moe_layer_freq": [0] + [1] * 60,
    "moe_router_group_topk": 1,
    "moe_router_num_groups": 1,
    "moe_router_topk_scaling_factor": 2.827,
}
ARGS_MOONLIGHT: Config = ARGS_KIMI_K2 | {
    "num_layers": 27,
    "hidden_size": 2048,
    "ffn_hidden_size": 11264,
    "num_attention_heads": 16,
    "kv_channels": 128,
    "norm_epsilon": 1e-5,
    "q_lora_rank": None,
    "rotary_scaling_factor": 1,
    "num_experts": 64,
    "moe_layer_freq": [0] + [1] * 26,
    "moe_ffn_hidden_size": 1408,
    "moe_router_topk": 6,
    "moe_shared_expert_intermediate_size": 2816,
    "moe_router_topk_scaling_factor": 2.446,
}
ARGS_GLM_47_FLASH: Config = COMMON | {
    "num_layers": 47,
    "hidden_size": 2048,
    "ffn_hidden_size": 10240,
    "num_attention_heads": 20,
    "kv_channels": 192,
    "add_qkv_bias": True,
    "vocab_size": 154880,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_head_dim": 192,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 256,
    "rotary_base": 1000000,
    "num_experts": 64,
    "moe_layer_freq": [0] + [1] * 46,
    "moe_ffn_hidden_size": 1536,
    "moe_router_topk": 4,
    "moe_shared_expert_intermediate_size": 1536,
    "moe_router_topk_scaling_factor": 1.8,
}


def wrong(config: Config, args: Config) -> list[tuple[str, str, str]]:
    return list(mismatches(dims_of(config), args))


@pytest.mark.parametrize(
    ("config", "args"),
    [(DEEPSEEK_V3, ARGS_DEEPSEEK_V3), (MOONLIGHT, ARGS_MOONLIGHT), (GLM_47_FLASH, ARGS_GLM_47_FLASH)],
    ids=["deepseek-v3", "moonlight", "glm4.7-flash"],
)
def test_published_launch_arguments_agree_with_published_configs(config: Config, args: Config) -> None:
    assert wrong(config, args) == []
    assert wrong(config, megatron_args(dims_of(config))) == []


def test_kimi_k2_is_trained_with_another_yarn_than_it_was_released_with() -> None:
    """Its release says beta_fast 1, Megatron's latent attention takes 32, and no flag of Megatron-LM says it."""
    assert wrong(KIMI_K2, ARGS_KIMI_K2) == [("beta_fast", "1.0", "32.0")]
    assert hint_of("beta_fast").startswith("Megatron-LM has no flag for it: set the attribute")
    assert wrong(KIMI_K2, ARGS_KIMI_K2 | {"beta_fast": 1.0}) == []


@pytest.mark.parametrize(
    ("argument", "value", "expected", "actual"),
    [
        ("multi_latent_attention", False, "True", "False"),
        ("q_lora_rank", None, "1536", "nothing"),
        ("kv_lora_rank", None, "512", "32"),
        ("qk_head_dim", 192, "128", "192"),
        ("qk_pos_emb_head_dim", 32, "64", "32"),
        ("v_head_dim", 256, "128", "256"),
        ("qk_layernorm", False, "True", "False"),
        ("rope_type", "rope", "yarn", "rope"),
        ("rotary_scaling_factor", 32, "40.0", "32"),
        ("rotary_interleaved", True, "False", "True"),
        ("mscale", 0.707, "1.0", "0.707"),
        ("mscale_all_dim", None, "1.0", "0.0"),
        ("original_max_position_embeddings", 8192, "4096", "8192"),
        ("beta_fast", 1, "32.0", "1"),
        ("beta_slow", 2, "1.0", "2"),
        ("moe_router_group_topk", None, "4", "1"),
    ],
)
def test_megatron_argument_that_differs_is_the_only_finding(
    argument: str, value: Any, expected: str, actual: str
) -> None:
    assert wrong(DEEPSEEK_V3, ARGS_DEEPSEEK_V3 | {argument: value}) == [(argument, expected, actual)]


def test_rotary_scaling_factor_of_one_means_no_yarn() -> None:
    assert wrong(DEEPSEEK_V3, ARGS_DEEPSEEK_V3 | {"rotary_scaling_factor": 1}) == [
        ("rope_type", "yarn", "rope"),
        ("rotary_scaling_factor", "40.0", "1"),
    ]
    assert wrong(MOONLIGHT, ARGS_MOONLIGHT | {"rotary_scaling_factor": 40}) == [
        ("rope_type", "rope", "yarn"),
        ("rotary_scaling_factor", "1.0", "40"),
    ]


def test_launch_flags_are_flags_that_megatron_has() -> None:
    flags = launch_flags(megatron_args(dims_of(DEEPSEEK_V3)))
    assert set(flags) >= {
        "--multi-latent-attention",
        "--q-lora-rank 1536",
        "--kv-lora-rank 512",
        "--qk-head-dim 128",
        "--qk-pos-emb-head-dim 64",
        "--v-head-dim 128",
        "--qk-layernorm",
        "--rope-type yarn",
        "--rotary-scaling-factor 40.0",
        "--mscale 1.0",
        "--mscale-all-dim 1.0",
    }
    assert not [
        flag
        for flag in flags
        if "beta" in flag or "original" in flag or flag.startswith(("#", "--group-query-attention"))
    ]
    assert "--q-lora-rank" not in " ".join(launch_flags(megatron_args(dims_of(MOONLIGHT))))
    comments = [flag for flag in launch_flags(megatron_args(dims_of(KIMI_K2))) if flag.startswith("#")]
    assert comments == ["# no flag says this: set args.beta_fast = 1.0 (else 32.0) before the model is built"]
