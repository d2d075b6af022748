"""Launch scripts of released models, written by hand from their published configs, against what the config alone gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ckptkit.cli import cli
from converters.arguments import megatron_args
from converters.launch_flags import launch_flags, pattern
from converters.planner import dims_of

QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
GLM_4_5: dict[str, Any] = {
    "model_type": "glm4_moe",
    "num_hidden_layers": 92,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151552,
    "rope_theta": 1000000,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 131072,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "use_qk_norm": True,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}

EVERY_MOE = {"--moe-router-dtype fp32", "--moe-grouped-gemm", "--moe-router-topk 8", "--untie-embeddings-and-output-weights", "--disable-bias-linear"}


def test_qwen3_30b_a3b() -> None:
    flags = set(launch_flags(megatron_args(dims_of(QWEN3_30B_A3B))))
    assert flags >= EVERY_MOE | {
        "--num-layers 48",
        "--hidden-size 2048",
        "--ffn-hidden-size 6144",
        "--num-attention-heads 32",
        "--group-query-attention",
        "--num-query-groups 4",
        "--kv-channels 128",
        "--vocab-size 151936",
        "--rotary-base 1000000",
        "--norm-epsilon 1e-06",
        "--normalization RMSNorm",
        "--position-embedding-type rope",
        "--swiglu",
        "--qk-layernorm",
        "--num-experts 128",
        "--moe-ffn-hidden-size 768",
        "--moe-router-score-function softmax",
        "--moe-layer-freq '([1]*48)'",
    }
    assert not {flag for flag in flags if flag.startswith(("--add-qkv-bias", "--moe-router-pre-softmax", "--moe-shared", "--rotary-interleaved", "--mtp"))}


def test_glm_4_5() -> None:
    flags = set(launch_flags(megatron_args(dims_of(GLM_4_5))))
    assert flags >= EVERY_MOE | {
        "--num-layers 92",
        "--rotary-percent 0.5",
        "--add-qkv-bias",
        "--qk-layernorm",
        "--mtp-num-layers 1",
        "--num-experts 160",
        "--moe-ffn-hidden-size 1536",
        "--moe-shared-expert-intermediate-size 1536",
        "--moe-router-score-function sigmoid",
        "--moe-router-enable-expert-bias",
        "--moe-router-pre-softmax",
        "--moe-router-topk-scaling-factor 2.5",
        "--moe-layer-freq '([0]*3+[1]*89)'",
    }


@pytest.mark.parametrize(
    ("values", "text"),
    [([1] * 48, "([1]*48)"), ([0] * 3 + [1] * 58, "([0]*3+[1]*58)"), ([1, 1, 1, 0] * 12, "(([1]*3+[0]*1)*12)"), ([0, 1, 1], "([0]*1+[1]*2)")],
)
def test_a_pattern_is_what_megatron_evaluates_it_to(values: list[int], text: str) -> None:
    assert pattern(values) == text
    assert eval(text) == values  # noqa: S307 - as Megatron's `moe_freq_type` does


def test_the_command_line_needs_only_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GLM_4_5))
    result = CliRunner().invoke(cli, ["inspect", "--megatron-args", str(tmp_path)])
    lines = result.output.splitlines()
    assert result.exit_code == 0
    assert (lines[0], lines[-1]) == ("MODEL_ARGS=(", ")")
    assert "    --num-query-groups 8" in lines
    as_json = CliRunner().invoke(cli, ["inspect", "--megatron-args", "--json", str(tmp_path)])
    assert json.loads(as_json.output)["num_query_groups"] == 8


# What Megatron-LM's `load_args_from_checkpoint` takes from a checkpoint under --use-checkpoint-args and a model depends on;
# whatever is absent there stays at Megatron's own default, which is another model.
_TAKEN = """num_layers hidden_size ffn_hidden_size seq_length num_attention_heads num_query_groups group_query_attention kv_channels
max_position_embeddings position_embedding_type add_position_embedding use_rotary_position_embeddings rotary_base rotary_percent
rotary_interleaved add_bias_linear add_qkv_bias squared_relu swiglu untie_embeddings_and_output_weights apply_layernorm_1p
normalization apply_query_key_layer_scaling attention_dropout hidden_dropout num_experts mtp_num_layers moe_layer_freq
moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax moe_grouped_gemm moe_shared_expert_intermediate_size
moe_router_score_function moe_router_enable_expert_bias moe_router_topk_scaling_factor padded_vocab_size""".split()  # noqa: SIM905 - seven lines instead of forty


@pytest.mark.parametrize("config", [QWEN3_30B_A3B, GLM_4_5])
def test_nothing_is_missing_for_use_checkpoint_args(config: dict[str, Any]) -> None:
    args = megatron_args(dims_of(config))
    assert [name for name in _TAKEN if name not in args] == []
    assert args["attention_dropout"] == args["hidden_dropout"] == 0.0
