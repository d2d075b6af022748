"""GLM-4-0414, Gemma 3 and GPT-OSS: what their configs come to, what is refused, and how GPT-OSS keeps its experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from families.case import save
from families.gpt_oss import CASES as GPT_OSS_CASES
from releases.record import load
from support import models

from ckptkit.app.api import convert, quantize
from ckptkit.core.errors import CkptkitError
from converters.experts import unfuse
from converters.megatron.arguments import megatron_args
from converters.megatron.parallel import ParallelSizes, check_sizes
from converters.ops.basic import GateUpInOne
from converters.planner import dims_of
from quant.formats.scheme import QuantScheme

GPT_OSS_20B, GLM4_9B, GEMMA3_4B = (
    dict(load(name).config) for name in ("openai/gpt-oss-20b", "THUDM/GLM-4-9B-0414", "google/gemma-3-4b-it")
)


def said(config: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """These Megatron-LM arguments of a config."""
    args = megatron_args(dims_of(config))
    return {name: args.get(name) for name in names}


def test_gpt_oss_without_rope_settings_has_those_of_transformers() -> None:
    bare = {key: value for key, value in GPT_OSS_20B.items() if not key.startswith("rope")}
    assert megatron_args(dims_of(bare)) == megatron_args(dims_of(GPT_OSS_20B))


def test_gemma3_as_released_leaves_defaults_out() -> None:
    dims = dims_of(GEMMA3_4B)
    assert (dims.root, dims.head, dims.tied) == ("language_model.model.", "language_model.lm_head.weight", True)
    sizes = (dims.vocab, dims.heads, dims.groups, dims.head_dim, dims.norm_eps, dims.max_positions)
    assert sizes == (262208, 8, 4, 256, 1e-6, 131072)
    assert (dims.rope_theta, dims.local_rope_theta, dims.attention_scale) == (1000000.0, 10000.0, 0.0625)
    assert dims.embedding_scale == pytest.approx(50.59644256)
    assert [layer for layer in range(34) if layer not in dims.window_layers] == [5, 11, 17, 23, 29]
    wanted = {"apply_layernorm_1p": True, "swiglu": False, "window_size": (1023, 0), "qk_layernorm": True}
    assert said(GEMMA3_4B, *wanted) == wanted
    # Only the full layers are scaled, and Megatron-LM's argument would scale all.
    assert said(GEMMA3_4B, "rotary_seq_len_interpolation_factor") == {"rotary_seq_len_interpolation_factor": None}


def test_biased_experts_are_not_cut() -> None:
    check_sizes(ParallelSizes(tp=2, ep=2), dims_of(GPT_OSS_20B))
    with pytest.raises(CkptkitError, match="--etp 2, but the experts of this model have biases"):
        check_sizes(ParallelSizes(tp=2, etp=2), dims_of(GPT_OSS_20B))


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


def test_biases_of_glm4_follow_the_config() -> None:
    assert said(GLM4_9B, "add_qkv_bias", "add_bias_linear") == {"add_qkv_bias": True, "add_bias_linear": False}
    assert said(GLM4_9B | {"attention_bias": False}, "add_qkv_bias") == {"add_qkv_bias": False}
