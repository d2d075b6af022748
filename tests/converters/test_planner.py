"""The planner refuses everything that does not add up, before a byte is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import models
from support.fixture_types import PathOf

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.reader import HfCheckpoint
from converters.megatron.arguments import megatron_args
from converters.planner import dims_of, expected_hf, to_megatron


class Headers:
    """A checkpoint of names and shapes; reading it is an error."""

    def __init__(self, config: dict[str, Any], specs: dict[str, TensorSpec]) -> None:
        self.config, self.specs, self.groups = config, specs, [(name,) for name in specs]

    def read(self, names: object) -> dict[str, torch.Tensor]:
        raise AssertionError("the planner must not read")


def headers(path: Path) -> Headers:
    """The real checkpoint's headers."""
    checkpoint = HfCheckpoint(path)
    return Headers(dict(checkpoint.config), dict(checkpoint.specs))


@pytest.mark.parametrize("name", list(models.configs()))
def test_expected_names_and_shapes_are_those_that_transformers_saves(releases: PathOf, name: str) -> None:
    checkpoint = HfCheckpoint(releases(name))
    assert expected_hf(checkpoint.config) == {key: spec.shape for key, spec in checkpoint.specs.items()}


def rename(checkpoint: Headers) -> None:
    spec = checkpoint.specs.pop("model.layers.11.mlp.experts.11.up_proj.weight")
    checkpoint.specs["model.layers.12.mlp.experts.11.up_proj.weight"] = spec


def wrong_shape(checkpoint: Headers) -> None:
    checkpoint.specs["model.layers.5.mlp.gate.weight"] = TensorSpec(
        "model.layers.5.mlp.gate.weight", (11, 128), "bfloat16"
    )


def extra(checkpoint: Headers) -> None:
    checkpoint.specs["model.layers.12.eh_proj.weight"] = TensorSpec(
        "model.layers.12.eh_proj.weight", (128, 256), "bfloat16"
    )


def two_dtypes(checkpoint: Headers) -> None:
    name = "model.layers.5.self_attn.k_proj.weight"
    checkpoint.specs[name] = TensorSpec(name, checkpoint.specs[name].shape, "float32")


def swapped_sizes(checkpoint: Headers) -> None:
    checkpoint.config["moe_intermediate_size"] = 160


def more_layers(checkpoint: Headers) -> None:
    checkpoint.config["num_hidden_layers"] = 13


def no_heads(checkpoint: Headers) -> None:
    del checkpoint.config["num_attention_heads"]


def unknown(checkpoint: Headers) -> None:
    checkpoint.config["model_type"] = "qwen2_audio"


def two_thetas(checkpoint: Headers) -> None:
    checkpoint.config["rope_theta"] = 12345.0


def quantized(checkpoint: Headers) -> None:
    checkpoint.config["quantization_config"] = {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename, r"lacks 1 tensor\(s\) that its config promises: model.layers.11.mlp.experts.11.up_proj.weight"),
        (wrong_shape, r"model.layers.5.mlp.gate.weight \[11, 128\] bfloat16: the config promises shape \[12, 128\]"),
        (extra, r"holds 1 tensor\(s\) that no rule of this model family knows: model.layers.12.eh_proj.weight"),
        (two_dtypes, "one Megatron tensor, two dtypes"),
        (swapped_sizes, r"the config promises shape \[160, 128\]"),
        (more_layers, r"model.layers.12.input_layernorm.weight"),
        (no_heads, "config.json has no 'num_attention_heads'"),
        (unknown, "model_type 'qwen2_audio' is not supported"),
        (two_thetas, "rope_theta is 12345.0 but rope_parameters says 10000.0"),
        (quantized, "is quantized"),
    ],
)
def test_plan_of_unsupported_checkpoint_is_refused(
    releases: PathOf, change: Callable[[Headers], None], message: str
) -> None:
    checkpoint = headers(releases("glm4_moe"))
    assert to_megatron(checkpoint, "here")
    change(checkpoint)
    with pytest.raises(CkptkitError, match=message):
        to_megatron(checkpoint, "here")


# From the launch scripts that people train these models with; the HF side from the published configs.
GLM_4_5 = {
    "model_type": "glm4_moe", "num_hidden_layers": 92, "hidden_size": 5120, "intermediate_size": 12288,
    "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552, "rms_norm_eps": 1e-5, "rope_theta": 1000000,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 160, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True,
}  # fmt: skip
QWEN_2_5_0_5B = {
    "model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}  # fmt: skip


def test_megatron_arguments_are_those_of_the_launch_scripts() -> None:
    glm = megatron_args(dims_of(GLM_4_5))
    for key, value in {
        "num_layers": 92, "hidden_size": 5120, "ffn_hidden_size": 12288, "num_attention_heads": 96,
        "num_query_groups": 8, "kv_channels": 128,
        "vocab_size": 151552, "rotary_base": 1000000, "rotary_percent": 0.5, "norm_epsilon": 1e-5, "num_experts": 160,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 1536, "moe_shared_expert_intermediate_size": 1536,
        "moe_layer_freq": [0] * 3 + [1] * 89, "qk_layernorm": True,
        "add_qkv_bias": True, "untie_embeddings_and_output_weights": True, "moe_router_pre_softmax": True,
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
    }.items():  # fmt: skip
        assert glm[key] == value, key
    qwen = megatron_args(dims_of(QWEN_2_5_0_5B))
    for key, value in {
        "num_layers": 24, "hidden_size": 896, "ffn_hidden_size": 4864, "num_attention_heads": 14,
        "num_query_groups": 2, "kv_channels": 64,
        "vocab_size": 151936, "rotary_base": 1000000, "rotary_percent": 1.0, "norm_epsilon": 1e-6,
        "add_qkv_bias": True, "qk_layernorm": False,
        "untie_embeddings_and_output_weights": False, "num_experts": None,
    }.items():  # fmt: skip
        assert qwen[key] == value, key


def test_arguments_hold_only_plain_values() -> None:
    assert json.loads(json.dumps(megatron_args(dims_of(GLM_4_5)))) == megatron_args(dims_of(GLM_4_5))
