"""CK7xx of `verify`: stored arguments, the source's config and parallel sizes, against the HF config.

The launch arguments and configs of released models stand here as they are published, so that the comparison is held
against what people really run.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fixture_types import CopyOf, OnlyFinding, PathOf

from converters.megatron.arguments import megatron_args
from converters.megatron.parallel import ParallelSizes, refusals
from converters.planner import dims_of
from verify.checks.config.arguments import mismatches
from verify.run import verify

QWEN25_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
QWEN25_15B = QWEN25_7B | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
GLM45 = {
    "model_type": "glm4_moe",
    "attention_bias": True,
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": True,
    "vocab_size": 151552,
}

COMMON = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "group_query_attention": True,
}
ARGS_QWEN25_7B = COMMON | {
    "num_layers": 28,
    "hidden_size": 3584,
    "ffn_hidden_size": 18944,
    "num_attention_heads": 28,
    "num_query_groups": 4,
    "kv_channels": None,
    "add_qkv_bias": True,
    "rotary_base": 1000000,
    "norm_epsilon": 1e-06,
    "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": 152064,
}
ARGS_QWEN25_15B = ARGS_QWEN25_7B | {
    "hidden_size": 1536,
    "ffn_hidden_size": 8960,
    "num_attention_heads": 12,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": False,
    "vocab_size": 151936,
    "padded_vocab_size": 152064,
    "rotary_base": 10000,
}
ARGS_QWEN3_30B_A3B = COMMON | {
    "num_layers": 48,
    "hidden_size": 2048,
    "ffn_hidden_size": 6144,
    "num_attention_heads": 32,
    "num_query_groups": 4,
    "kv_channels": 128,
    "qk_layernorm": True,
    "rotary_base": 1000000,
    "norm_epsilon": 1e-6,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 151936,
    "num_experts": 128,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 768,
    "moe_layer_freq": [1] * 48,
    "moe_router_score_function": "softmax",
}
ARGS_GLM45 = COMMON | {
    "num_layers": 92,
    "hidden_size": 5120,
    "ffn_hidden_size": 12288,
    "num_attention_heads": 96,
    "num_query_groups": 8,
    "kv_channels": 128,
    "qk_layernorm": True,
    "add_qkv_bias": True,
    "rotary_base": 1000000,
    "rotary_percent": 0.5,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 151552,
    "num_experts": 160,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 1536,
    "moe_shared_expert_intermediate_size": 1536,
    "moe_layer_freq": [0] * 3 + [1] * 89,
    "moe_router_pre_softmax": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
}


def wrong(config: dict[str, Any], args: dict[str, Any]) -> list[tuple[str, str, str]]:
    return list(mismatches(dims_of(config), args))


@pytest.mark.parametrize(
    ("config", "args"),
    [(QWEN25_7B, ARGS_QWEN25_7B), (QWEN3_30B_A3B, ARGS_QWEN3_30B_A3B), (GLM45, ARGS_GLM45)],
    ids=["qwen2.5-7B", "qwen3-30B", "glm4.5"],
)
def test_published_launch_arguments_agree_with_published_configs(config: dict[str, Any], args: dict[str, Any]) -> None:
    assert wrong(config, args) == []


def test_published_launch_arguments_with_another_rotary_base_are_found() -> None:
    assert wrong(QWEN25_15B, ARGS_QWEN25_15B) == [("rotary_base", "1000000", "10000")]


@pytest.mark.parametrize(
    ("argument", "value", "expected", "actual"),
    [
        ("num_layers", 91, "92", "91"),
        ("hidden_size", 4096, "5120", "4096"),
        ("ffn_hidden_size", 10944, "12288", "10944"),
        ("num_attention_heads", 64, "96", "64"),
        ("num_query_groups", 4, "8", "4"),
        ("group_query_attention", False, "8", "96"),
        ("kv_channels", 64, "128", "64"),
        ("kv_channels", None, "128", "53"),
        ("rotary_base", 500000, "1000000", "500000"),
        ("rotary_base", None, "1000000", "10000"),
        ("rotary_percent", 1.0, "0.5", "1.0"),
        ("norm_epsilon", 1e-6, "1e-05", "1e-06"),
        ("qk_layernorm", False, "True", "False"),
        ("add_qkv_bias", None, "True", "False"),
        ("add_bias_linear", True, "False", "True"),
        ("swiglu", False, "True", "False"),
        ("normalization", "LayerNorm", "RMSNorm", "LayerNorm"),
        ("position_embedding_type", "none", "rope", "none"),
        ("untie_embeddings_and_output_weights", False, "True", "False"),
        ("num_experts", 128, "160", "128"),
        ("moe_layer_freq", [0] + [1] * 91, "3 dense layers, then 89 MoE layers", "1 dense layers, then 91 MoE layers"),
        ("moe_layer_freq", 1, "3 dense layers, then 89 MoE layers", "0 dense layers, then 92 MoE layers"),
        ("moe_ffn_hidden_size", None, "1536", "12288"),
        ("moe_shared_expert_intermediate_size", None, "1536", "0"),
        ("moe_router_topk", 4, "8", "4"),
        ("moe_router_score_function", "softmax", "sigmoid", "softmax"),
        ("moe_router_enable_expert_bias", False, "True", "False"),
        ("moe_router_topk_scaling_factor", None, "2.5", "1.0"),
        ("moe_router_num_groups", 8, "1", "8"),
        ("moe_router_group_topk", 4, "1", "4"),
        ("mtp_num_layers", 1, "0", "1"),
        ("vocab_size", 151329, "151552", "151329"),
        ("padded_vocab_size", 151329, "at least 151552", "151329"),
    ],
)
def test_megatron_argument_that_differs_is_the_only_finding(
    argument: str, value: Any, expected: str, actual: str
) -> None:
    found = wrong(GLM45, ARGS_GLM45 | {argument: value})
    shown = "num_query_groups" if argument == "group_query_attention" else argument
    assert (shown, expected, actual) in found
    # The layer count also changes the dense/MoE pattern where that is not a list; nothing else may be dragged in.
    assert len(found) == 1


def test_megatron_arguments_without_the_promised_mtp_layer_are_found() -> None:
    assert wrong(GLM45 | {"num_nextn_predict_layers": 1}, ARGS_GLM45) == [("mtp_num_layers", "1", "0")]


def test_softmax_before_topk_matters_for_a_softmax_router_only() -> None:
    assert wrong(QWEN3_30B_A3B, ARGS_QWEN3_30B_A3B | {"moe_router_pre_softmax": True}) == [
        ("moe_router_pre_softmax", "False", "True")
    ]
    assert wrong(GLM45, ARGS_GLM45 | {"moe_router_pre_softmax": False}) == []


def test_megatron_arguments_in_equivalent_spellings_have_no_finding() -> None:
    assert (
        wrong(QWEN3_30B_A3B, ARGS_QWEN3_30B_A3B | {"moe_layer_freq": 1, "ffn_hidden_size": 1, "norm_epsilon": 0.000001})
        == []
    )
    assert wrong(GLM45, ARGS_GLM45 | {"mtp_num_layers": None}) == []
    assert wrong(GLM45 | {"num_nextn_predict_layers": 1}, ARGS_GLM45 | {"mtp_num_layers": 1}) == []
    older = {key: value for key, value in ARGS_QWEN25_7B.items() if key != "position_embedding_type"} | {
        "use_rotary_position_embeddings": True
    }
    assert wrong(QWEN25_7B, older) == []


def with_args(path: Path, **changes: Any) -> None:
    common = torch.load(path / "release" / "common.pt", weights_only=False)
    common["args"] = Namespace(**(vars(common["args"]) | changes))
    torch.save(common, path / "release" / "common.pt")


def test_stored_arguments_of_another_model(converted: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    path = copy_of(converted("glm4_moe"))
    with_args(path, rotary_base=1000000)
    finding = only(verify(path))
    assert (finding.code, finding.expected, finding.actual) == ("CK701", "rotary_base = 10000", "rotary_base = 1000000")
    assert finding.file == str(path / "release" / "common.pt")


def test_a_checkpoint_without_arguments_is_skipped(converted: PathOf, copy_of: CopyOf) -> None:
    path = copy_of(converted("qwen2-tied"))
    common = torch.load(path / "release" / "common.pt", weights_only=False)
    del common["args"]
    torch.save(common, path / "release" / "common.pt")
    report = verify(path)
    assert report.findings == []
    assert [(check.code, check.reason) for check in report.checks if check.status == "skipped"] == [
        (code, "common.pt holds no training arguments, which Megatron accepts") for code in ("CK114", "CK701")
    ]


def test_a_config_that_changed_on_the_way(
    releases: PathOf, converted: PathOf, copy_of: CopyOf, only: OnlyFinding
) -> None:
    path = copy_of(releases("glm4_moe"))
    config = json.loads((path / "config.json").read_text())
    config["rms_norm_eps"] = 1e-6
    (path / "config.json").write_text(json.dumps(config))
    for source in (releases("glm4_moe"), converted("glm4_moe")):
        finding = only(verify(path, source=source))
        assert (finding.code, finding.expected, finding.actual) == (
            "CK702",
            "rms_norm_eps = 1e-05",
            "rms_norm_eps = 1e-06",
        )


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((1, 1), []),
        ((8, 32), []),
        ((16, 1), []),
        (
            (5, 1),
            [
                "num_attention_heads",
                "num_key_value_heads",
                "intermediate_size",
                "moe_intermediate_size",
                "the shared experts' size",
            ],
        ),
        ((64, 1), ["num_attention_heads"]),
        ((1, 3), ["the number of experts"]),
    ],
)
def test_parallel_sizes_of_glm45_are_refused_or_accepted(sizes: tuple[int, int], said: list[str]) -> None:
    tp, ep = sizes
    found = [one.expected.split(" that ")[0] for one in refusals(dims_of(GLM45), ParallelSizes(tp, ep=ep, etp=tp))]
    assert found == said


def test_parallel_sizes_that_do_not_divide_are_found(releases: PathOf, only: OnlyFinding) -> None:
    finding = only(verify(releases("glm4_moe"), tp=2, pp=5, ep=4))
    assert (finding.code, finding.actual) == ("CK703", "num_hidden_layers = 12")
    assert "--decoder-last-pipeline-num-layers" in finding.hint
    assert only(verify(releases("qwen2-tied"), ep=2)).code == "CK703"


LLAMA_3_2: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 28,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"use_rope_scaling": True, "rope_scaling_factor": 32.0}, []),
        # As a published script passes it: that factor is latent attention's, and Megatron would scale by 8.
        ({"use_rope_scaling": True, "rotary_scaling_factor": 32.0}, [("rope_scaling_factor", "32.0", "8.0")]),
        ({}, [("use_rope_scaling", "True", "False"), ("rope_scaling_factor", "32.0", "nothing")]),
    ],
)
def test_rope_scaling_of_llama_3(scaling: dict[str, Any], said: list[tuple[str, str, str]]) -> None:
    args = {name: value for name, value in megatron_args(dims_of(LLAMA_3_2)).items() if "scaling" not in name} | scaling
    assert list(mismatches(dims_of(LLAMA_3_2), args)) == said
