"""GLM-4-0414, Gemma 3 and GPT-OSS: what their configs come to, what is refused, and how GPT-OSS keeps its experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from families.case import save
from families.gpt_oss import CASES as GPT_OSS_CASES
from support import models

from ckptkit.app.api import convert, quantize
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import View
from converters.experts import fuse, unfuse
from converters.megatron.arguments import megatron_args
from converters.megatron.flags import launch_flags
from converters.megatron.parallel import ParallelSizes, check_sizes
from converters.ops.basic import GateUpInOne
from converters.planner import dims_of
from quant.formats.scheme import QuantScheme
from verify.checks.config.arguments import mismatches

# config.json of openai/gpt-oss-20b, zai-org/GLM-4-9B-0414 and google/gemma-3-4b-it: the keys that decide the model.
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
GLM4_9B: dict[str, Any] = {
    "model_type": "glm4",
    "attention_bias": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151552,
}
GEMMA3_4B: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model"},
}


def gemma_with(**text: Any) -> dict[str, Any]:
    return GEMMA3_4B | {"text_config": GEMMA3_4B["text_config"] | text}


# scripts/models/glm4-9B.sh of slime; examples/post_training/modelopt/conf/openai/gpt-oss-20b.sh of Megatron-LM 0.19,
# with what its --enable-gpt-oss sets (megatron/post_training/model_builder.py).
ARGS_GLM4_9B: dict[str, Any] = {
    "swiglu": True,
    "num_layers": 40,
    "hidden_size": 4096,
    "ffn_hidden_size": 13696,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 2,
    "use_rotary_position_embeddings": True,
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "rotary_base": 10000,
    "vocab_size": 151552,
    "post_self_attn_layernorm": True,
    "post_mlp_layernorm": True,
    "rotary_interleaved": True,
    "rotary_percent": 0.5,
    "untie_embeddings_and_output_weights": True,
}
ARGS_GPT_OSS_20B: dict[str, Any] = {
    "untie_embeddings_and_output_weights": True,
    "normalization": "RMSNorm",
    "num_layers": 24,
    "hidden_size": 2880,
    "ffn_hidden_size": 2880,
    "num_attention_heads": 64,
    "group_query_attention": True,
    "num_query_groups": 8,
    "kv_channels": 64,
    "num_experts": 32,
    "moe_ffn_hidden_size": 2880,
    "moe_router_topk": 4,
    "moe_router_score_function": "softmax",
    "rotary_percent": 1.0,
    "rotary_base": 150000,
    "padded_vocab_size": 201088,
    "quick_geglu": True,
    "glu_linear_offset": 1.0,
    "softmax_type": "learnable",
    "window_attn_skip_freq": 2,
    "activation_func_clamp_value": 7.0,
    "window_size": (128, 0),
    "position_embedding_type": "yarn",
    "rotary_scaling_factor": 32.0,
    "yarn_original_max_position_embeddings": 131072,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": False,
}


def wrong(config: Mapping[str, Any], args: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    return list(mismatches(dims_of(config), args))


def said(config: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """These Megatron-LM arguments of a config."""
    args = megatron_args(dims_of(config))
    return {name: args.get(name) for name in names}


def test_arguments_of_gpt_oss() -> None:
    assert said(
        GPT_OSS_20B,
        "swiglu",
        "quick_geglu",
        "glu_linear_offset",
        "activation_func_clamp_value",
        "add_bias_linear",
        "add_qkv_bias",
        "softmax_type",
    ) == {
        "swiglu": False,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "softmax_type": "learnable",
    }
    # A query sees 127 tokens before its own. NVIDIA's launch scripts say 127 or 128, and disagree on 4096 below too.
    assert said(GPT_OSS_20B, "window_size", "window_attn_skip_freq") == {
        "window_size": (127, 0),
        "window_attn_skip_freq": [1, 0] * 12,
    }
    assert said(
        GPT_OSS_20B, "position_embedding_type", "use_rotary_position_embeddings", "rotary_scaling_factor", "rotary_base"
    ) == {
        "position_embedding_type": "yarn",
        "use_rotary_position_embeddings": False,
        "rotary_scaling_factor": 32.0,
        "rotary_base": 150000,
    }
    yarn = (
        "yarn_original_max_position_embeddings",
        "yarn_beta_fast",
        "yarn_beta_slow",
        "yarn_correction_range_round_to_int",
        "mscale",
        "mscale_all_dim",
    )
    assert list(said(GPT_OSS_20B, *yarn).values()) == [4096, 32.0, 1.0, False, 1.0, 0.0]
    router = (
        "moe_router_score_function",
        "moe_router_pre_softmax",
        "moe_router_topk",
        "num_experts",
        "moe_ffn_hidden_size",
    )
    assert list(said(GPT_OSS_20B, *router).values()) == ["softmax", False, 4, 32, 2880]


def test_gpt_oss_as_a_launch_script() -> None:
    flags = launch_flags(megatron_args(dims_of(GPT_OSS_20B)))
    assert {
        "--window-size 127,0",
        "--window-attn-skip-freq '(([1]*1+[0]*1)*12)'",
        "--quick-geglu",
        "--glu-linear-offset 1.0",
        "--activation-func-clamp-value 7.0",
        "--softmax-type learnable",
        "--position-embedding-type yarn",
        "--rotary-scaling-factor 32.0",
        "--yarn-original-max-position-embeddings 4096",
        "--no-yarn-correction-range-round-to-int",
    } <= set(flags)
    assert not {"--swiglu", "--disable-bias-linear"} & set(flags)


def test_gpt_oss_without_rope_settings_has_those_of_transformers() -> None:
    bare = {key: value for key, value in GPT_OSS_20B.items() if not key.startswith("rope")}
    assert megatron_args(dims_of(bare)) == megatron_args(dims_of(GPT_OSS_20B))


def test_arguments_of_glm4() -> None:
    """Those of slime's `scripts/models/glm4-9B.sh`."""
    wanted = {
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
        "rotary_interleaved": True,
        "rotary_percent": 0.5,
        "rotary_base": 10000,
        "norm_epsilon": 1e-5,
        "ffn_hidden_size": 13696,
        "num_query_groups": 2,
        "untie_embeddings_and_output_weights": True,
    }
    assert said(GLM4_9B, *wanted) == wanted
    assert said(GLM4_9B | {"attention_bias": False}, "add_qkv_bias") == {"add_qkv_bias": False}


def test_gemma3_as_released_leaves_defaults_out() -> None:
    dims = dims_of(GEMMA3_4B)
    assert (dims.root, dims.head, dims.tied) == ("language_model.model.", "language_model.lm_head.weight", True)
    assert (dims.vocab, dims.heads, dims.groups, dims.head_dim, dims.norm_eps, dims.max_positions) == (
        262208,
        8,
        4,
        256,
        1e-6,
        131072,
    )
    assert (dims.rope_theta, dims.local_rope_theta, dims.attention_scale) == (1000000.0, 10000.0, 0.0625)
    assert dims.embedding_scale == pytest.approx(50.59644256)
    assert [layer for layer in range(34) if layer not in dims.window_layers] == [5, 11, 17, 23, 29]
    wanted = {
        "apply_layernorm_1p": True,
        "swiglu": False,
        "window_size": (1023, 0),
        "untie_embeddings_and_output_weights": False,
        "qk_layernorm": True,
    }
    assert said(GEMMA3_4B, *wanted) == wanted
    # Only the full layers are scaled, and Megatron-LM's argument would scale all.
    assert said(GEMMA3_4B, "rotary_seq_len_interpolation_factor", "rotary_base") == {
        "rotary_seq_len_interpolation_factor": None,
        "rotary_base": 1000000,
    }


def test_a_published_launch_script_that_agrees_with_the_release() -> None:
    assert wrong(GLM4_9B, ARGS_GLM4_9B) == []


def test_published_launch_script_that_contradicts_the_release_is_found() -> None:
    """One token too many in every window, and the rotation of a model trained with contexts 32 times as long."""
    found = wrong(GPT_OSS_20B, ARGS_GPT_OSS_20B)
    assert found == [
        ("yarn_original_max_position_embeddings", "4096", "131072"),
        ("window_size", "(127, 0)", "(128, 0)"),
    ]


@pytest.mark.parametrize(
    ("config", "args", "argument", "expected", "actual"),
    [
        (GLM4_9B, {"rotary_interleaved": False}, "rotary_interleaved", "True", "False"),
        (GLM4_9B, {"post_self_attn_layernorm": False}, "post_self_attn_layernorm", "True", "False"),
        (GLM4_9B, {"post_mlp_layernorm": None}, "post_mlp_layernorm", "True", "False"),
        (GLM4_9B, {"apply_layernorm_1p": True}, "apply_layernorm_1p", "False", "True"),
        (GPT_OSS_20B, {"quick_geglu": False}, "quick_geglu", "True", "False"),
        (GPT_OSS_20B, {"glu_linear_offset": None}, "glu_linear_offset", "1.0", "0.0"),
        (GPT_OSS_20B, {"activation_func_clamp_value": None}, "activation_func_clamp_value", "7.0", "nothing"),
        (GPT_OSS_20B, {"softmax_type": "vanilla"}, "softmax_type", "learnable", "vanilla"),
        (GPT_OSS_20B, {"window_attn_skip_freq": None}, "window_attn_skip_freq", str((1, 0) * 12), str((1,) * 24)),
        (
            GPT_OSS_20B,
            {"window_attn_skip_freq": [0, 1] * 12},
            "window_attn_skip_freq",
            str((1, 0) * 12),
            str((0, 1) * 12),
        ),
        (GPT_OSS_20B, {"rotary_scaling_factor": 4.0}, "rotary_scaling_factor", "32.0", "4.0"),
        (GPT_OSS_20B, {"yarn_beta_fast": 16.0}, "yarn_beta_fast", "32.0", "16.0"),
        (GPT_OSS_20B, {"yarn_beta_slow": 2.0}, "yarn_beta_slow", "1.0", "2.0"),
        (
            GPT_OSS_20B,
            {"yarn_correction_range_round_to_int": True},
            "yarn_correction_range_round_to_int",
            "False",
            "True",
        ),
        (GPT_OSS_20B, {"mscale_all_dim": 1.0}, "mscale_all_dim", "0.0", "1.0"),
    ],
)
def test_megatron_argument_that_differs_is_the_only_finding(
    config: Mapping[str, Any], args: Mapping[str, Any], argument: str, expected: str, actual: str
) -> None:
    right = ARGS_GPT_OSS_20B | {"window_size": [127, 0], "yarn_original_max_position_embeddings": 4096}
    assert wrong(config, (ARGS_GLM4_9B if config is GLM4_9B else right) | args) == [(argument, expected, actual)]


def test_biased_experts_are_not_cut() -> None:
    check_sizes(ParallelSizes(tp=2, ep=2), dims_of(GPT_OSS_20B))
    with pytest.raises(CkptkitError, match="--etp 2, but the experts of this model have biases"):
        check_sizes(ParallelSizes(tp=2, etp=2), dims_of(GPT_OSS_20B))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT_OSS_20B | {"attention_bias": False}, "gpt_oss without attention_bias is not supported"),
        (GPT_OSS_20B | {"swiglu_limit": 5.0}, "swiglu_limit 5.0 is not supported"),
        (
            GPT_OSS_20B | {"layer_types": ["full_attention"] * 23},
            "not a list of sliding_attention or full_attention for 24 layers",
        ),
        (
            GPT_OSS_20B | {"layer_types": ["chunked_attention"] * 24},
            "not a list of sliding_attention or full_attention for 24 layers",
        ),
        (GEMMA3_4B | {"text_config": None}, "gemma3 without a text_config"),
        (gemma_with(attention_bias=True), "gemma3 with attention_bias True is not supported"),
        (gemma_with(attn_logit_softcapping=50.0), "gemma3 with attn_logit_softcapping 50.0 is not supported"),
        (gemma_with(final_logit_softcapping=30.0), "gemma3 with final_logit_softcapping 30.0 is not supported"),
        (gemma_with(hidden_activation="gelu"), "gemma3 with hidden_activation 'gelu' is not supported"),
        (gemma_with(use_bidirectional_attention=True), "gemma3 with use_bidirectional_attention True is not supported"),
        (gemma_with(sliding_window_pattern=0), "sliding_window_pattern is 0, not a positive whole number"),
        (gemma_with(query_pre_attn_scalar=0), "query_pre_attn_scalar is 0"),
        (gemma_with(rope_parameters="linear"), "rope_parameters is 'linear', not an object"),
        (
            gemma_with(rope_parameters={"rope_type": "linear", "factor": 8.0}),
            "they must be under full_attention and sliding_attention",
        ),
        (gemma_with(rope_scaling={"rope_type": "linear"}), "config.json has no 'factor'"),
        (
            gemma_with(rope_scaling={"rope_type": "yarn", "factor": 8.0}),
            "rope 'yarn' in full layers and 'default' in those with a window",
        ),
        (
            gemma_with(rope_parameters={"sliding_attention": {"rope_type": "linear", "factor": 2.0}}),
            "rope 'linear' in full layers and 'linear' in those with a window",
        ),
    ],
)
def test_config_that_is_unsupported_is_refused_by_name(config: Mapping[str, Any], message: str) -> None:
    with pytest.raises(CkptkitError, match=message):
        dims_of(config)


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        (GPT_OSS_20B, {"attention_factor": 1.2}),
        (GPT_OSS_20B, {"original_max_position_embeddings": None}),
        (GLM4_9B, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}),
        (GLM4_9B, {"rope_type": "linear", "factor": 2.5}),
    ],
)
def test_rope_scaling_without_arguments_is_refused(config: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    """Covers an attention factor, a missing length, YaRN over half of a head, and a fractional factor."""
    with pytest.raises(CkptkitError, match="as it stands there has no Megatron arguments"):
        megatron_args(dims_of({**config, "rope_scaling": config.get("rope_scaling", {}) | rope}))


def test_fused_gate_up_op_keeps_rows_and_shards_both_halves() -> None:
    both = torch.tensor([[1], [2], [3], [4], [11], [12], [13], [14]])
    assert torch.equal(GateUpInOne().merge([both]), both)
    assert torch.equal(GateUpInOne().split(both)[0], both)
    assert GateUpInOne().shard(both, 1, 2).flatten().tolist() == [3, 4, 13, 14]


def test_gpt_oss_experts() -> None:
    """Hidden size 3, 2 rows of gate and up each: columns of gate_up_proj are gate 0, up 0, gate 1, up 1."""
    first = torch.tensor([[10, 20, 11, 21], [12, 22, 13, 23], [14, 24, 15, 25]])
    fused = {
        "a.mlp.experts.gate_up_proj": torch.stack([first, first + 100]),
        "a.mlp.experts.gate_up_proj_bias": torch.tensor([[1, 5, 2, 6], [3, 7, 4, 8]]),
        "a.mlp.experts.down_proj": torch.tensor([[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]]]),
        "a.mlp.experts.down_proj_bias": torch.tensor([[1, 2, 3], [4, 5, 6]]),
    }
    source = models.InMemory(GPT_OSS_20B, fused)
    single = View(source, unfuse(source.specs, GPT_OSS_20B, "here"))
    assert {name: tensor.tolist() for name, tensor in single.read(list(single.specs)).items()} == {
        "a.mlp.experts.0.gate_proj.weight": [[10, 12, 14], [11, 13, 15]],
        "a.mlp.experts.0.up_proj.weight": [[20, 22, 24], [21, 23, 25]],
        "a.mlp.experts.1.gate_proj.weight": [[110, 112, 114], [111, 113, 115]],
        "a.mlp.experts.1.up_proj.weight": [[120, 122, 124], [121, 123, 125]],
        "a.mlp.experts.0.gate_proj.bias": [1, 2],
        "a.mlp.experts.0.up_proj.bias": [5, 6],
        "a.mlp.experts.1.gate_proj.bias": [3, 4],
        "a.mlp.experts.1.up_proj.bias": [7, 8],
        "a.mlp.experts.0.down_proj.weight": [[1, 4], [2, 5], [3, 6]],
        "a.mlp.experts.1.down_proj.weight": [[7, 10], [8, 11], [9, 12]],
        "a.mlp.experts.0.down_proj.bias": [1, 2, 3],
        "a.mlp.experts.1.down_proj.bias": [4, 5, 6],
    }
    again = View(single, fuse(single.specs, GPT_OSS_20B, "here"))
    assert {name: tensor.tolist() for name, tensor in again.read(list(again.specs)).items()} == {
        name: tensor.tolist() for name, tensor in fused.items()
    }


@pytest.mark.parametrize(
    ("name", "shape", "axes"), [("gate_up_proj", (12, 192), "3 axes"), ("gate_up_proj_bias", (12, 192, 1), "2 axes")]
)
def test_fused_experts_with_other_axes_are_refused(name: str, shape: tuple[int, ...], axes: str) -> None:
    source = models.InMemory(GPT_OSS_20B, {f"a.mlp.experts.{name}": torch.zeros(shape)})
    with pytest.raises(CkptkitError, match=f"fused experts must have {axes}"):
        unfuse(source.specs, GPT_OSS_20B, "here")


def test_int4_experts_that_no_reader_knows_one_by_one_are_refused(tmp_path: Path) -> None:
    save("gpt_oss", GPT_OSS_CASES["gpt_oss"], tmp_path / "release", torch.bfloat16)
    convert(tmp_path / "release", tmp_path / "megatron")
    for go in (quantize, lambda src, dst, scheme: convert(tmp_path / "megatron", dst, quantize=scheme)):
        with pytest.raises(CkptkitError, match="INT4 gpt_oss is not supported"):
            go(tmp_path / "release", tmp_path / "int4", QuantScheme(32, "qmax7"))
