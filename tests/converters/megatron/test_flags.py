"""Launch scripts of released models, written by hand from their configs, against what the config alone gives."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from families import CASES, case

from ckptkit.app.api import model_arguments
from ckptkit.app.cli import cli
from converters.megatron.arguments import megatron_args
from converters.megatron.flags import launch_flags, pattern
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

NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e\+\d+)?(?![\w.])")
EVERY_MOE = {
    "--moe-router-dtype fp32",
    "--moe-grouped-gemm",
    "--moe-router-topk 8",
    "--untie-embeddings-and-output-weights",
    "--disable-bias-linear",
}


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
    assert not {
        flag
        for flag in flags
        if flag.startswith(
            ("--add-qkv-bias", "--moe-router-pre-softmax", "--moe-shared", "--rotary-interleaved", "--mtp")
        )
    }


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
    [
        ([1] * 48, "([1]*48)"),
        ([0] * 3 + [1] * 58, "([0]*3+[1]*58)"),
        ([1, 1, 1, 0] * 12, "(([1]*3+[0]*1)*12)"),
        ([0, 1, 1], "([0]*1+[1]*2)"),
    ],
)
def test_a_pattern_is_what_megatron_evaluates_it_to(values: list[int], text: str) -> None:
    assert pattern(values) == text
    assert eval(text) == values  # noqa: S307 - as Megatron's `moe_freq_type` does


def test_inspect_megatron_args_needs_only_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GLM_4_5))
    result = CliRunner().invoke(cli, ["inspect", "--megatron-args", str(tmp_path)])
    lines = result.output.splitlines()
    assert result.exit_code == 0
    assert (lines[0], lines[-1]) == ("MODEL_ARGS=(", ")")
    assert "    --num-query-groups 8" in lines
    as_json = CliRunner().invoke(cli, ["inspect", "--megatron-args", "--json", str(tmp_path)])
    assert json.loads(as_json.output)["num_query_groups"] == 8


# What a model depends on of what Megatron-LM's `load_args_from_checkpoint` takes from a checkpoint; whatever is absent
# there stays at Megatron's own default, which is another model.
_TAKEN = """
num_layers hidden_size ffn_hidden_size seq_length num_attention_heads num_query_groups group_query_attention
kv_channels max_position_embeddings position_embedding_type add_position_embedding use_rotary_position_embeddings
rotary_base rotary_percent rotary_interleaved add_bias_linear add_qkv_bias squared_relu swiglu
untie_embeddings_and_output_weights apply_layernorm_1p normalization apply_query_key_layer_scaling attention_dropout
hidden_dropout num_experts mtp_num_layers moe_layer_freq moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax
moe_grouped_gemm moe_shared_expert_intermediate_size moe_router_score_function moe_router_enable_expert_bias
moe_router_topk_scaling_factor padded_vocab_size
""".split()  # noqa: SIM905 - seven lines instead of forty


@pytest.mark.parametrize("config", [QWEN3_30B_A3B, GLM_4_5])
def test_checkpoint_args_have_all_that_megatron_reads(config: dict[str, Any]) -> None:
    args = megatron_args(dims_of(config))
    assert [name for name in _TAKEN if name not in args] == []
    assert args["attention_dropout"] == args["hidden_dropout"] == 0.0


# As published for google/gemma-3-27b-it, and for google/gemma-3-1b-it.
GEMMA_3_27B: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
GEMMA_3_1B: dict[str, Any] = {
    "model_type": "gemma3_text",
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}


def comments(tmp_path: Path, config: dict[str, Any]) -> list[str]:
    """The comments of `inspect --megatron-args`, each without the words that all of them begin with."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = CliRunner().invoke(cli, ["inspect", "--megatron-args", str(tmp_path)])
    assert done.exit_code == 0
    return [
        line.strip().removeprefix("# no flag says this: ")
        for line in done.output.splitlines()
        if line.strip().startswith("#")
    ]


def test_queries_scaled_by_position_are_said_by_inspect_and_convert(tmp_path: Path) -> None:
    """megatron-core 0.19.2 has no such scale; its logits equal transformers' up to there (`test_families.py`)."""
    case.save("ministral3", CASES["ministral3"], tmp_path / "hf", torch.bfloat16)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert [line for line in comments(tmp_path, config) if line.startswith("queries")] == [
        "queries scaled by their position from token 16 on (up to there Megatron computes the same model): "
        "Megatron-Bridge's attention for Ministral 3"
    ]
    done = CliRunner().invoke(cli, ["convert", str(tmp_path / "hf"), str(tmp_path / "out"), "--dry-run"])
    assert done.exit_code == 0
    told = " ".join(done.output.split())
    assert "megatron-core computes this model up to 16 tokens: beyond, it does not scale queries by position" in told
    unscaled = config | {"rope_parameters": config["rope_parameters"] | {"llama_4_scaling_beta": 0}}
    assert not [line for line in comments(tmp_path, unscaled) if line.startswith("queries")]


def test_gemma3_comments_name_what_flags_cannot_build(tmp_path: Path) -> None:
    """Megatron-Bridge's Gemma3ModelProvider has all of these, Megatron-LM's options none.

    sqrt(5376) is 73.3212, 168**-0.5 is 0.0771517.
    """
    said = comments(tmp_path, GEMMA_3_27B)
    assert [line.partition(":")[0] for line in said] == [
        "the gated MLP of gelu's tanh approximation",
        "a rotary base of 10000 in layers with a window (--rotary-base is that of the others)",
        "linear rope scaling by 8 in layers without a window",
        "the scale of attention",
        "embeddings times 73.3212",
        "norms after attention and after the MLP, inside their last linear layers",
    ]
    assert said[3].startswith("the scale of attention: set config.softmax_scale = 0.077151674")
    assert said[3].endswith("(else 0.08838834764831845, of the head size)")
    as_json = json.loads(CliRunner().invoke(cli, ["inspect", "--megatron-args", "--json", str(tmp_path)]).output)
    assert as_json["no_argument_for"] == said
    assert (as_json["rotary_base"], as_json["swiglu"]) == (1000000, False)


def test_gemma3_1b_comments_leave_out_default_scales(tmp_path: Path) -> None:
    assert [line.partition(":")[0] for line in comments(tmp_path, GEMMA_3_1B)] == [
        "the gated MLP of gelu's tanh approximation",
        "a rotary base of 10000 in layers with a window (--rotary-base is that of the others)",
        "embeddings times 33.9411",
        "norms after attention and after the MLP, inside their last linear layers",
    ]


@pytest.mark.parametrize("config", [QWEN3_30B_A3B, GLM_4_5])
def test_model_that_flags_build_has_no_comment(config: dict[str, Any], tmp_path: Path) -> None:
    assert comments(tmp_path, config) == []
    assert "no_argument_for" not in model_arguments(tmp_path)


# tests/converters/test_nemotron_h.py has those of a model without either.
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("nemotron_h")])
def test_flags_of_every_family_state_gate_and_rotary_embedding(name: str, tmp_path: Path) -> None:
    """Against the config classes of transformers: its activation, and how its rotary embedding is scaled."""
    config = CASES[name].config()
    text = config.get_text_config()
    stated = CASES[name].edit(json.loads(config.to_json_string(use_diff=False)))
    (tmp_path / "config.json").write_text(json.dumps(stated))
    args = model_arguments(tmp_path)
    lines = launch_flags(args)
    gate = getattr(text, "hidden_activation", None) or text.hidden_act
    said = {"silu": "--swiglu", "gelu_pytorch_tanh": "# no flag says this: the gated MLP of gelu's tanh approximation"}[
        gate
    ]
    if text.model_type == "gpt_oss":
        said = "--quick-geglu"  # transformers `GptOssExperts`, whatever hidden_act says
    assert [line for line in lines if line.startswith(said)]
    ropes = text.rope_parameters
    numbers = {
        kind: [float(number) for line in lines if kind in line for number in NUMBER.findall(line)]
        for kind in ("rotary", "scaling", "interpolation")
    }
    for rope in ropes.values() if "full_attention" in ropes else [ropes]:
        assert rope["rope_theta"] in numbers["rotary"]
        # Of Llama 3's scaling, --use-rope-scaling means a factor of 8.
        usual = rope["rope_type"] == "llama3" and rope["factor"] == 8 and "--use-rope-scaling" in lines
        found = numbers["scaling"] + numbers["interpolation"]
        assert rope["rope_type"] == "default" or usual or rope["factor"] in found
    unsaid = text.model_type in ("gemma3_text", "minimax_m2", "ministral3") or name == "llama-tied"
    assert bool(args.get("no_argument_for")) == unsaid


def test_a_rope_factor_that_no_builder_of_megatron_hands_on_is_a_comment_and_no_flag(tmp_path: Path) -> None:
    """Llama 3.2's: --rope-scaling-factor is parsed by Megatron and reaches no model."""
    config = CASES["llama-tied"].config()
    assert config.rope_parameters["factor"] == 32.0
    (tmp_path / "config.json").write_text(config.to_json_string())
    lines = launch_flags(model_arguments(tmp_path))
    assert not [line for line in lines if line.startswith("--rope-scaling-factor")]
    factor = "rope scaling by 32 (--use-rope-scaling scales by 8): hand rope_scaling_factor to GPTModel"
    assert f"# no flag says this: {factor} in gpt_builders.py" in lines
