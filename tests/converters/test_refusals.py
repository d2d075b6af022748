"""Configs that the rules do not describe, or that readers read differently, are refused, and the key is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from families import HF_CASES
from families.table import config_of

from ckptkit.converters.planner import dims_of
from ckptkit.core.errors import CkptkitError

# By test model, the keys of the language model that have one value in every release.
FIXED = {
    "bailing_moe": "use_qk_norm "
    "use_bias use_qkv_bias norm_head norm_softmax moe_router_enable_expert_bias norm_topk_prob",
    "deepseek_v3": "attention_bias scoring_func topk_method norm_topk_prob",
    "deepseek_v32": "index_k_norm_type index_init_tokens index_local_tokens cli_factor index_kpool",
    "ernie4_5_moe": "use_bias moe_layer_interval",
    "exaone_moe": "norm_topk_prob scoring_func swiglu_limits sliding_windows",
    "gemma3_text": "attention_bias attn_logit_softcapping final_logit_softcapping hidden_activation "
    "use_bidirectional_attention",
    "glm4_moe": "norm_topk_prob scoring_func topk_method hidden_act",
    "gpt_oss": "attention_bias swiglu_limit",
    "hy_v3": "attention_bias mlp_bias moe_router_enable_expert_bias moe_router_use_sigmoid qk_norm route_norm",
    "kimi_k3": "hidden_act latent_moe_use_norm mla_use_nope mla_use_output_gate moe_renormalize use_grouped_topk "
    "moe_router_activation_func num_nextn_predict_layers tie_word_embeddings topk_method moe_layer_freq model_type "
    "linear_attn_config.num_heads linear_attn_config.use_full_rank_gate",
    "llama": "hidden_act",
    "mimo": "attention_bias use_mrope",
    "minimax_m2": "use_qk_norm qk_norm_type scoring_func use_routing_bias shared_intermediate_size sliding_window",
    "ministral3": "sliding_window",
    "mistral": "layer_types",
    "nemotron_h": "attention_bias conv_kernel mamba_hidden_act mamba_proj_bias mlp_bias mlp_hidden_act "
    "n_shared_experts sliding_window use_bias use_conv_bias norm_topk_prob",
    "olmoe": "attention_bias norm_topk_prob clip_qkv num_key_value_heads rms_norm_eps",
    "qwen3-tied": "attention_bias",
    "qwen3_5": "attention_bias attn_output_gate mtp_use_dedicated_embeddings mlp_only_layers decoder_sparse_step",
    "qwen3_moe": "attention_bias",
    "qwen3_next": "attention_bias attn_output_gate mtp_use_dedicated_embeddings mlp_only_layers decoder_sparse_step",
    "qwen3_omni_moe_thinker": "attention_bias sliding_window",
    "qwen3_vl_moe": "attention_bias norm_topk_prob",
    "seed_oss": "attention_bias attention_out_bias mlp_bias",
}
# What no reader can make sense of, and what two of them take differently: `key=value` in JSON, of one config each.
CHANGED = {
    "bailing_moe": "score_function='softmax' topk_group=1 moe_shared_expert_intermediate_size=64 "
    "use_sliding_window=true num_experts=null use_qk_norm=null",
    "deepseek_v3": "num_key_value_heads=5 rope_interleave=false partial_rotary_factor=0.5 q_lora_rank=0 "
    "kv_lora_rank=null first_k_dense_replace=null first_k_dense_replace=-1 moe_layer_freq=2 n_shared_experts=0 "
    "n_group=null n_group=5 topk_group=5 num_experts_per_tok=3 rope_parameters.partial_rotary_factor=0.5",
    "deepseek_v32": "q_lora_rank=null index_topk=null index_n_heads=0 index_head_dim=8 mlp_layer_types=12",
    "ernie4_5_moe": "moe_num_experts=[64,64]",
    "exaone_moe": "layer_types=null sliding_window=null is_moe_layer=2 is_moe_layer=[true] mlp_layer_types=['sparse']",
    "gemma3_text": "sliding_window_pattern=0 query_pre_attn_scalar=0 rope_parameters='linear'",
    "glm4_moe": "num_attention_heads=6.9 num_hidden_layers='12' num_hidden_layers=1000000000000 "
    "num_hidden_layers=1000000000 num_hidden_layers=null tie_word_embeddings='false' rms_norm_eps=NaN rms_norm_eps=0 "
    "num_experts_per_tok=13 num_experts_per_tok=0 n_group=[1] routed_scaling_factor='2.5' rope_parameters='yarn' "
    "n_shared_experts=0",
    "glm4_moe_lite": "mlp_layer_types=['dense'] mlp_layer_types=12 first_k_dense_replace=2",
    "glm_moe_dsa": "indexer_rope_interleave=null indexer_rope_interleave='yes' indexer_types=['full'] indexer_types=12 "
    "indexer_types=[['full']] index_topk_pattern='FFFFFFFFFFFX' index_topk_pattern='FSFSFSFSFSFS' index_topk_freq=0 "
    "index_topk_freq=2 first_k_dense_replace=2",
    "glm_moe_dsa-shared": "num_nextn_predict_layers=2",
    "hy_v3": "expert_hidden_dim=80 first_k_dense_replace=3",
    "kimi_k3": "num_key_value_heads=2 q_lora_rank=null rope_scaling={'type':'yarn','factor':2.0} attn_res_block_size=0 "
    "linear_attn_config=null linear_attn_config.full_attn_layers=[4,8,12] linear_attn_config.kda_layers=[0,1,2,3]",
    "llama": "attention_bias=true mlp_bias=true",
    "mimo": "use_sliding_window=true num_nextn_predict_layers='1'",
    "minimax_m2": "attn_type_list=[1,0] attn_type_list=1 partial_rotary_factor=1.0",
    "mistral": "sliding_window=0 sliding_window='4096'",
    "mixtral": "sliding_window=4.5",
    "nemotron_h-latent": "hybrid_override_pattern='EM' layers_block_type=['mamba','gru'] layers_block_type=[] "
    "num_hidden_layers=12 layer_norm_epsilon=1e-6 norm_eps=1e-6 time_step_limit=[0.0,0.1] "
    "time_step_limit=[0.001,1e308] mamba_n_groups=2 mamba_num_heads=10 ssm_state_size=0 moe_latent_size=0 "
    "attention_head_dim=64",
    "qwen2-tied": "use_sliding_window=true",
    "qwen2_moe": "use_sliding_window=true decoder_sparse_step=0 mlp_only_layers=3 mlp_only_layers=['3'] "
    "mlp_only_layers=[12]",
    "qwen3-tied": "use_sliding_window=true layer_types=['sliding_attention']",
    "qwen3_moe": "use_sliding_window=true mlp_only_layers=[-1]",
    "qwen3_5": "full_attention_interval=0 full_attention_interval=3 layer_types=['full_attention'] "
    "linear_num_value_heads=6 linear_key_head_dim=0 mtp_num_hidden_layers=2 num_nextn_predict_layers=0",
}
EVERY_FIFTH = [("full" if number % 5 == 4 else "linear") + "_attention" for number in range(12)]
# Those for which it takes more than one key, or a long list, and words of the refusal.
TOGETHER: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_next", {"mtp_num_hidden_layers": 1, "num_nextn_predict_layers": 0}, "mtp_num_hidden_layers is 1 but"),
    ("qwen3_5", {"full_attention_interval": 5, "layer_types": EVERY_FIFTH}, "linear"),
    ("glm_moe_dsa", {"index_topk_freq": 2, "index_skip_topk_offset": 0}, "from layer 0 on"),
    ("glm_moe_dsa", {"indexer_types": ["shared"] + ["full"] * 11}, "shares"),
    ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full", "full"] * 3}, "at one distance"),
    ("deepseek_v32", {"mlp_layer_types": ["dense"] * 12}, "first_k_dense_replace"),
    ("exaone_moe", {"layer_types": ["full_attention"] * 12}, "sliding"),
    ("exaone_moe", {"n_group": 4, "topk_group": 2}, "2 groups"),
    (
        "gemma3_text",
        {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
        "full_attention and sliding_attention",
    ),
    ("gemma3_text-v4", {"rope_scaling": {"rope_type": "linear"}}, "has no 'factor'"),
    ("gemma3_text-v4", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "window"),
    ("gpt_oss", {"layer_types": ["chunked_attention"] * 12}, "or full_attention for 12 layers"),
    ("glm4_moe", {"model_type": ["glm4_moe"]}, "is not supported"),
    (
        "nemotron_h-latent",
        {"mtp_layers_block_type": ["attention", "mlp"], "layers_block_type": ["mamba", "moe", "mlp"]},
        "of other kinds",
    ),
]


@cache
def stated(name: str) -> Mapping[str, Any]:
    config = config_of(HF_CASES[name])
    dims_of(config)
    return config


def changed(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with other values in its language model; a dot in a key leads into an object."""
    config: dict[str, Any] = json.loads(json.dumps(stated(name)))
    for key, value in changes.items():
        *path, leaf = key.split(".")
        place = config.get("text_config", config)
        for part in path:
            place = place[part]
        place[leaf] = value
    return config


def refusal(name: str, changes: Mapping[str, Any]) -> str:
    """The words of the refusal, or nothing."""
    try:
        dims_of(changed(name, changes))
    except CkptkitError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", FIXED)
def test_a_key_with_one_value_in_all_releases_has_no_other(name: str) -> None:
    for key in FIXED[name].split():
        refused = [value for value in (True, False, "other", 97) if key.split(".")[-1] in refusal(name, {key: value})]
        assert len(refused) >= 3, key


@pytest.mark.parametrize("name", CHANGED)
def test_a_value_that_readers_cannot_agree_on_is_named(name: str) -> None:
    for one in CHANGED[name].split():
        key, _, text = one.partition("=")
        value = json.loads(text.replace("'", '"'))
        words = refusal(name, {key: value})
        assert key.split(".")[-1] in words or str(value) in words, one


@pytest.mark.parametrize(("name", "changes", "words"), TOGETHER)
def test_settings_that_do_not_go_together_are_refused(name: str, changes: Mapping[str, Any], words: str) -> None:
    assert words in refusal(name, changes)
