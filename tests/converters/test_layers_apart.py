"""Configs of GLM-4-0414, Gemma 3, GPT-OSS, K-EXAONE, Ling 2.0 and Qwen3-Omni by hand, and GPT-OSS's experts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CASES
from families.case import save
from families.gpt_oss import CASES as GPT_OSS_CASES
from families.table import config_of
from releases.record import load
from support import models

from ckptkit.app.api import convert, quantize
from ckptkit.converters.config.values import language_part
from ckptkit.converters.experts import unfuse
from ckptkit.converters.megatron.argument_table import BY_NAME
from ckptkit.converters.megatron.arguments import launch_flags, megatron_args
from ckptkit.converters.megatron.hybrid_model import as_gpt_args
from ckptkit.converters.megatron.parallel import ParallelSizes, check_sizes
from ckptkit.converters.open import open_checkpoint
from ckptkit.converters.ops.basic import GateUpInOne
from ckptkit.converters.planner import dims_of, to_megatron
from ckptkit.converters.registry import family_of
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.side_files import write_config
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.checks.config.arguments import mismatches

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
    with pytest.raises(CkptkitError, match="--etp 2"):
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
    with pytest.raises(CkptkitError, match="Megatron.*arguments"):
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
    with pytest.raises(CkptkitError, match=axes):
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


# K-EXAONE: which layers are dense, which have a window and rotary embedding.

EXAONE = CASES["exaone_moe"]
FULL = [0, 0, 0, 1] * 3


def test_full_layers_have_neither_window_nor_rotary_embedding() -> None:
    dims = dims_of(config_of(EXAONE))
    assert (dims.window, dims.window_layers, dims.nope_layers) == (5, (0, 1, 2, 4, 5, 6, 8, 9, 10), (3, 7, 11))
    args = megatron_args(dims)
    assert (args["window_size"], args["window_attn_skip_freq"]) == ((4, 0), [1 - one for one in FULL])
    assert args["no_rope_freq"] == FULL
    assert "--no-rope-freq '(([0]*3+[1]*1)*3)'" in launch_flags(args)
    # A window as long as the context is none, and its layers still are those with rotary embedding.
    wide = dims_of(config_of(EXAONE, sliding_window=256))
    assert (wide.window, wide.window_layers, wide.nope_layers) == (None, (), (3, 7, 11))


def test_hybridmodel_counts_layers_without_rotary_embedding_twice() -> None:
    dims = dims_of(config_of(EXAONE))
    hybrid = megatron_args(dims, "hybrid")
    assert hybrid["no_rope_freq"] == [0, 0, 0, 0, 0, 0, 1, 1] * 3
    assert as_gpt_args(hybrid)["no_rope_freq"] == FULL
    assert list(mismatches(dims, hybrid)) == []


@pytest.mark.parametrize(
    ("freq", "found"),
    [(4, tuple(FULL)), (FULL, tuple(FULL)), ([0] * 12, None), (None, None), (0, None), (3, (0, 0, 1) * 4)],
)
def test_a_launch_says_by_number_or_list_where_rotary_embedding_is_missing(freq: Any, found: Any) -> None:
    args = {**megatron_args(dims_of(config_of(EXAONE))), "no_rope_freq": freq}
    assert BY_NAME["no_rope_freq"].of_args(args) == found
    names = [name for name, _, _ in mismatches(dims_of(config_of(EXAONE)), args)]
    assert names == ([] if found == tuple(FULL) else ["no_rope_freq"])


def test_dense_layers_in_every_spelling() -> None:
    assert dims_of(config_of(EXAONE)).dense == (0, 1)
    assert dims_of(config_of(EXAONE, is_moe_layer=None)).dense == (0, 1)
    older = config_of(EXAONE, mlp_layer_types=None, is_moe_layer=[False] + [True] * 11, first_last_k_dense_replace=1)
    assert dims_of(older).dense == (0,)
    assert dims_of({**older, "first_k_dense_replace": 2, "is_moe_layer": None}).dense == (0, 1)


def test_what_later_releases_state_may_say_the_same() -> None:
    stated = config_of(EXAONE, sliding_windows=[5, 5, 5, 0] * 3, swiglu_limits=[0.0] * 12)
    assert dims_of(stated) == dims_of(config_of(EXAONE))


# Ling 2.0: queries, keys and values in one matrix.

LING = CASES["bailing_moe"]


def test_rows_of_queries_keys_and_values_are_put_in_groups(tmp_path: Path) -> None:
    """10 heads of 32 in two groups: the release has all queries, then all keys, then all values."""
    save("bailing_moe", LING, tmp_path, torch.bfloat16)
    hf, view = models.tensors(tmp_path), to_megatron(open_checkpoint(tmp_path), "the test model")
    name = "decoder.layers.4.self_attention.linear_qkv.weight"
    stored = hf["model.layers.4.attention.query_key_value.weight"]
    assert stored.shape == (448, 128)
    places = [(0, 160), (320, 352), (384, 416), (160, 320), (352, 384), (416, 448)]
    assert torch.equal(view.read([name])[name], torch.cat([stored[first:last] for first, last in places]))


def test_what_the_config_may_leave_out() -> None:
    absent = dict.fromkeys(("moe_shared_expert_intermediate_size", "score_function", "use_bias", "norm_head"), ...)
    dims = dims_of(config_of(LING, **absent))
    assert dims == dims_of(config_of(LING))
    assert (dims.rotary_fraction, dims.rope_theta, dims.dense, dims.shared_ffn) == (0.5, 600000.0, (0, 1), 192)


def test_the_first_ling_is_another_model() -> None:
    with pytest.raises(UnsupportedError, match="BailingMoeForCausalLM of model_type 'bailing_moe' is another model"):
        dims_of(config_of(LING, architectures=["BailingMoeForCausalLM"]))


# Qwen3-Omni: where its language model is, in config.json and among the tensors.


def omni(**changes: Any) -> dict[str, Any]:
    """What config.json of the whole test model says, with changes in the thinker's text_config."""
    case = CASES["qwen3_omni_moe"]
    stated = case.edit(json.loads(case.config().to_json_string(use_diff=False)))
    stated["thinker_config"]["text_config"] |= changes
    return stated


def test_the_thinker_alone_is_the_same_model_under_shorter_names() -> None:
    whole = omni()
    alone = {**whole["thinker_config"], "model_type": "qwen3_omni_moe_thinker"}
    found, shorter = dims_of(whole), dims_of(alone)
    assert (found.root, found.head) == ("thinker.model.", "thinker.lm_head.weight")
    assert (shorter.root, shorter.head) == ("model.", "lm_head.weight")
    assert megatron_args(found) == megatron_args(shorter)
    assert megatron_args(found)["rotary_interleaved"] is False  # whatever `interleaved` says of the three axes
    assert language_part(whole) == language_part(alone) == whole["thinker_config"]["text_config"]


def test_what_is_beside_the_language_model_is_carried() -> None:
    family = family_of(omni())
    carried = ["thinker.audio_tower.conv2d1.weight", "thinker.visual.merger.ln_q.weight", "talker.codec_head.weight"]
    assert [name for name in (*carried, "code2wav.x", "thinker.model.norm.weight") if not family.carries(name)] == [
        "thinker.model.norm.weight"
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**omni(), "thinker_config": None}, "qwen3_omni_moe without a thinker_config"),
        ({**omni(), "thinker_config": {"text_config": None}}, "text_config is None, not an object"),
        ({**omni(), "thinker_config": 7}, "thinker_config is 7, not an object"),
        (omni(num_hidden_layers=5000), "thinker_config.text_config.num_hidden_layers is 5000, not at most 1,000"),
    ],
)
def test_a_config_that_is_unsupported_is_refused_by_name(config: Mapping[str, Any], message: str) -> None:
    with pytest.raises(CkptkitError, match=message):
        dims_of(family_of(config) and config)


def test_a_written_config_states_the_dtype_where_the_release_does(tmp_path: Path) -> None:
    """Nowhere at the top; null in the text_config of the releases stays null."""
    config = omni(dtype=None)
    config["thinker_config"]["dtype"] = "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_config(tmp_path, config, {"x": TensorSpec("x", (2,), "float32")})
    config["thinker_config"]["dtype"] = "float32"
    assert json.loads((tmp_path / "config.json").read_text()) == config
