"""Megatron's HybridModel holds every model that it can, under names that differ from GPTModel's and nothing else.

The logits are those of Megatron's own HybridModel (MambaModel before megatron-core 0.18), loaded strictly.
"""

from __future__ import annotations

import filecmp
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from families import CASES
from families.case import far, save, tokens
from families.table import config_of
from families.worker import ask
from support.installed import require_megatron
from support.nightly import daily

from ckptkit.app.api import convert, inspect, model_arguments
from ckptkit.converters.megatron.arguments import launch_flags, megatron_args
from ckptkit.converters.megatron.hybrid_model import as_gpt_args, hybrid_pattern, is_hybrid, needs_release, with_stages
from ckptkit.converters.megatron.pipeline import Pipeline
from ckptkit.converters.planner import dims_of, rules_of
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import fold
from ckptkit.formats.torch_dist.reader import NOT_WEIGHTS, TorchDistCheckpoint
from ckptkit.verify.checks.config.arguments import mismatches

TOLERANCE = 1e-5
# Linear attention is computed in another order by the two; GPTModel's logits differ from transformers' by as much.
LINEAR = {"qwen3_next": 5e-5, "qwen3_5_moe": 5e-5, "qwen3_5_moe_text": 5e-5}
GPT_ONLY = {
    "llama": "rope scaling of Llama 3",
    "llama-tied": "rope scaling of Llama 3",
    "minimax_m2": "all heads",
    "moonlight": "a norm before linear_q_proj",
    "glm_moe_dsa-shared": "share",
    "glm4": "norms",
    "glm4-tied": "norms",
    "gemma3_text": "norms",
    "gemma3_text-v4": "norms",
    "gemma3": "norms",
}
HELD = [name for name in CASES if name not in GPT_ONLY]
# Each of their layers is one block, as a layer of HybridModel is: GPTModel cannot hold them.
HYBRID_ONLY = [name for name in CASES if name.startswith("nemotron_h")]
BOTH = [name for name in HELD if name not in HYBRID_ONLY]
# Dense, experts behind dense layers, latent attention with MTP.
DAILY = ("qwen2-tied", "glm4_moe", "deepseek_v3")


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("qwen2-tied", "*-" * 12),
        ("glm4_moe-mtp", "*-*-" + "*E" * 10 + "/*E"),
        ("mimo-tied-two-layers", "*-" * 4 + "/*-/*-"),
        ("deepseek_v3", "+-+-+-" + "+E" * 9 + "/+E"),
        ("deepseek_v32", "D-D-D-" + "DE" * 9 + "/DE"),
        ("qwen3_next", "GEGEGE*E" * 3 + "/*E"),
    ],
)
def test_pattern_has_two_letters_a_layer(name: str, pattern: str) -> None:
    assert hybrid_pattern(dims_of(config_of(CASES[name]))) == pattern


def test_norms_of_sparse_attention_are_modules_of_their_own() -> None:
    names = [rule.megatron for rule in rules_of(config_of(CASES["deepseek_v32"]), "hybrid")]
    assert "decoder.layers.4.self_attention.q_layernorm.weight" in names
    assert "mtp.layers.0.mtp_model_layer.layers.0.self_attention.kv_layernorm.weight" in names
    assert not [name for name in names if "up_proj.layer_norm_weight" in name]
    latent = [rule.megatron for rule in rules_of(config_of(CASES["deepseek_v3"]), "hybrid")]
    assert "decoder.layers.4.self_attention.linear_q_up_proj.layer_norm_weight" in latent


def test_arguments_say_the_pattern_in_the_place_of_lists() -> None:
    dims = dims_of(config_of(CASES["glm4_moe"]))
    gpt, hybrid = megatron_args(dims), megatron_args(dims, "hybrid")
    assert hybrid["num_layers"] == 24
    assert hybrid["hybrid_layer_pattern"] == "*-*-" + "*E" * 10
    assert {name for name, value in gpt.items() if hybrid.get(name) != value} == {"num_layers", "moe_layer_freq"}


def test_windows_count_the_layers_of_attention() -> None:
    dims = dims_of(config_of(CASES["gpt_oss"]))
    gpt = megatron_args(dims)["window_attn_skip_freq"]
    assert gpt[:4] == [1, 0, 1, 0]
    assert megatron_args(dims, "hybrid")["window_attn_skip_freq"][:8] == [1, 1, 0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize("name", BOTH)
def test_arguments_describe_the_model_in_the_terms_of_gpt_too(name: str) -> None:
    dims = dims_of(config_of(CASES[name]))
    args = megatron_args(dims, "hybrid")
    assert list(mismatches(dims, args)) == []
    assert as_gpt_args(args)["num_layers"] == dims.layers
    staged = with_stages(args["hybrid_layer_pattern"], Pipeline(2 * dims.layers, 2))
    assert staged.index("|") == dims.layers
    assert list(mismatches(dims, args | {"hybrid_layer_pattern": staged})) == []
    old = {key: value for key, value in args.items() if key != "hybrid_layer_pattern"}
    assert list(mismatches(dims, old | {"hybrid_override_pattern": args["hybrid_layer_pattern"]})) == []


@pytest.mark.parametrize("pattern", ["*-" * 11, "-*" * 12, "*-" * 11 + "*E", "M" + "*-" * 12, "nonsense"])
def test_pattern_of_another_model_is_named(pattern: str) -> None:
    dims = dims_of(config_of(CASES["qwen2-tied"]))
    args = megatron_args(dims, "hybrid") | {"hybrid_layer_pattern": pattern}
    assert list(mismatches(dims, args)) == [("hybrid_layer_pattern", "*-" * 12, pattern)]


def test_stages_are_numbered_as_megatron_numbers_chunks() -> None:
    assert with_stages("*-*E*E*E/*E", Pipeline(8, 2, vpp=2)) == "*-|*E|*E|*E/*E"
    assert with_stages("*-*E*E*E", Pipeline(8, 2, last=3)) == "*-*E*|E*E"
    assert with_stages("*-*E", Pipeline(4)) == "*-*E"


@pytest.mark.parametrize(("name", "reason"), GPT_ONLY.items())
def test_a_model_that_only_gptmodel_holds_is_refused_by_name(tmp_path: Path, name: str, reason: str) -> None:
    save(name, CASES[name], tmp_path / "hf", torch.bfloat16)
    with pytest.raises(CkptkitError, match=f"HybridModel.*{reason}"):
        convert(tmp_path / "hf", tmp_path / "out", dialect="hybrid")
    assert not (tmp_path / "out").exists()


def same_files(one: Path, other: Path, pattern: str) -> None:
    """Both directories have the same files of this kind, byte for byte."""
    names = sorted(file.name for file in one.glob(pattern))
    assert names
    assert names == sorted(file.name for file in other.glob(pattern))
    assert [name for name in names if not filecmp.cmp(one / name, other / name, shallow=False)] == []


@pytest.mark.parametrize("name", daily(BOTH, DAILY))
def test_conversion_goes_between_hf_and_both_dialects_byte_for_byte(tmp_path: Path, name: str) -> None:
    save(name, CASES[name], tmp_path / "hf", torch.bfloat16)
    convert(tmp_path / "hf", tmp_path / "gpt")
    convert(tmp_path / "gpt", tmp_path / "hybrid", dialect="hybrid")
    convert(tmp_path / "hybrid", tmp_path / "back", dialect="mcore")
    convert(tmp_path / "hybrid", tmp_path / "exported")
    convert(tmp_path / "hf", tmp_path / "direct", dialect="hybrid")
    same_files(tmp_path / "hybrid" / "release", tmp_path / "direct" / "release", "*")
    same_files(tmp_path / "gpt" / "release", tmp_path / "back" / "release", "*")
    same_files(tmp_path / "hf", tmp_path / "exported", "*.safetensors")
    same_files(tmp_path / "gpt" / "hf", tmp_path / "hybrid" / "hf", "*")
    assert is_hybrid(TorchDistCheckpoint(tmp_path / "hybrid" / "release").specs)


def test_the_output_layers_extra_state_is_stored_also_where_the_embedding_is_tied(tmp_path: Path) -> None:
    save("qwen2-tied", CASES["qwen2-tied"], tmp_path / "hf", torch.bfloat16)
    convert(tmp_path / "hf", tmp_path / "hybrid", dialect="hybrid")
    found = TorchDistCheckpoint(tmp_path / "hybrid" / "release")
    assert "output_layer._extra_state/shard_0_1" in found.metadata.objects
    assert "output_layer.weight" not in found.specs
    assert "decoder.final_norm.weight" in fold(found.specs)


def test_inspect_says_which_class_it_holds_and_prints_its_arguments(tmp_path: Path) -> None:
    save("glm4_moe", CASES["glm4_moe"], tmp_path / "hf", torch.bfloat16)
    convert(tmp_path / "hf", tmp_path / "gpt")
    convert(tmp_path / "hf", tmp_path / "hybrid", dialect="hybrid")
    pattern = "*-*-" + "*E" * 10
    assert inspect(tmp_path / "gpt")["model"] == "GPTModel"
    assert inspect(tmp_path / "hybrid")["model"] == f"HybridModel, layer pattern {pattern}"
    assert "hybrid_layer_pattern" not in model_arguments(tmp_path / "gpt")
    flags = launch_flags(model_arguments(tmp_path / "hybrid"))
    assert f"--hybrid-layer-pattern '{pattern}'" in flags
    assert "--num-layers 24" in flags
    assert not [flag for flag in flags if "moe-layer-freq" in flag]
    assert "pretrain_hybrid.py builds HybridModel" in flags[-1]


@pytest.mark.parametrize("name", daily(HELD, (*DAILY, "nemotron_h-latent")))
def test_hybridmodel_loads_it_strictly_and_computes_the_logits_of_the_reference(tmp_path: Path, name: str) -> None:
    require_megatron()
    case, found = CASES[name], tuple(map(int, version("megatron-core").split(".")[:2]))
    if lacking := [what for what, since in needs_release(dims_of(config_of(CASES[name])), 1) if found < since]:
        pytest.skip(f"the HybridModel of megatron-core {found} has no {lacking[0]}")
    model, added = save(name, case, tmp_path / "hf", torch.float32)
    convert(tmp_path / "hf", tmp_path / "hybrid", dialect="hybrid")
    answer = ask(tmp_path / "hf", tmp_path / "hybrid", tokens(), None)
    assert answer.unexpected == []
    assert [key for key in answer.missing if not NOT_WEIGHTS.fullmatch(key)] == []
    with torch.no_grad():
        assert far(answer.logits, case.reference(model, tokens())) < LINEAR.get(name, TOLERANCE)
        if case.mtp:
            assert answer.mtp is not None
            assert far(answer.mtp, case.mtp(model, added, tokens())) < LINEAR.get(name, TOLERANCE)
