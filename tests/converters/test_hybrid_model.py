"""Megatron's HybridModel holds every model that it can, under names that differ from GPTModel's and nothing else.

The logits are those of Megatron's own HybridModel (MambaModel before megatron-core 0.18), loaded strictly.
"""

from importlib.metadata import version

import pytest
import torch
from families import CASES
from families.case import far, save, tokens
from families.table import config_of
from families.worker import ask
from support import models
from support.installed import require_megatron
from support.messages import refusal, text_with
from support.nightly import daily

from ckptkit.app.api import convert, inspect, model_arguments
from ckptkit.converters.megatron.arguments import launch_flags, megatron_args
from ckptkit.converters.megatron.hybrid_model import as_gpt_args, hybrid_pattern, is_hybrid, needs_release, with_stages
from ckptkit.converters.megatron.pipeline import Pipeline
from ckptkit.converters.planner import dims_of, rules_of
from ckptkit.formats.torch_dist.reader import NOT_WEIGHTS, TorchDistCheckpoint
from ckptkit.verify.checks.config.arguments import mismatches

TOLERANCE = 1e-5
# Linear attention is computed in another order by the two; GPTModel's logits differ from transformers' by as much.
LINEAR = {"qwen3_next": 5e-5, "qwen3_5_moe": 5e-5, "qwen3_5_moe_text": 5e-5}
# Models that only GPTModel holds, and a word of the reason.
GPT_ONLY = dict.fromkeys(("llama", "llama-tied"), "Llama 3")
GPT_ONLY |= {"minimax_m2": "all heads", "moonlight": "linear_q_proj", "glm_moe_dsa-shared": "share"}
GPT_ONLY |= dict.fromkeys(("glm4", "glm4-tied", "gemma3_text", "gemma3_text-v4", "gemma3"), "norms")
HELD = [name for name in CASES if name not in GPT_ONLY]
# Each of their layers is one block, as a layer of HybridModel is: GPTModel cannot hold them.
HYBRID_ONLY = [name for name in CASES if name.startswith("nemotron_h")]
BOTH = [name for name in HELD if name not in HYBRID_ONLY]
# Dense, experts behind dense layers, latent attention with MTP.
DAILY = ("qwen2-tied", "glm4_moe", "deepseek_v3")


PATTERNS = {
    "qwen2-tied": "*-" * 12,
    "glm4_moe": "*-*-" + "*E" * 10,
    "glm4_moe-mtp": "*-*-" + "*E" * 10 + "/*E",
    "mimo-tied-two-layers": "*-" * 4 + "/*-/*-",
    "deepseek_v3": "+-+-+-" + "+E" * 9 + "/+E",
    "deepseek_v32": "D-D-D-" + "DE" * 9 + "/DE",
    "qwen3_next": "GEGEGE*E" * 3 + "/*E",
}


def test_pattern_has_two_letters_a_layer():
    assert {name: hybrid_pattern(dims_of(config_of(CASES[name]))) for name in PATTERNS} == PATTERNS


def test_norms_of_sparse_attention_are_modules_of_their_own():
    names = [rule.megatron for rule in rules_of(config_of(CASES["deepseek_v32"]), "hybrid")]
    assert "decoder.layers.4.self_attention.q_layernorm.weight" in names
    assert "mtp.layers.0.mtp_model_layer.layers.0.self_attention.kv_layernorm.weight" in names
    assert not [name for name in names if "up_proj.layer_norm_weight" in name]
    latent = [rule.megatron for rule in rules_of(config_of(CASES["deepseek_v3"]), "hybrid")]
    assert "decoder.layers.4.self_attention.linear_q_up_proj.layer_norm_weight" in latent


def test_arguments_have_the_pattern_in_the_place_of_lists_and_count_layers_twice():
    dims = dims_of(config_of(CASES["glm4_moe"]))
    gpt, hybrid = megatron_args(dims), megatron_args(dims, "hybrid")
    assert (hybrid["num_layers"], hybrid["hybrid_layer_pattern"]) == (24, PATTERNS["glm4_moe"])
    assert {name for name, value in gpt.items() if hybrid.get(name) != value} == {"num_layers", "moe_layer_freq"}
    windows = megatron_args(dims_of(config_of(CASES["gpt_oss"])), "hybrid")["window_attn_skip_freq"]
    assert windows[:8] == [1, 1, 0, 0, 1, 1, 0, 0]
    unrotated = megatron_args(dims_of(config_of(CASES["exaone_moe"])), "hybrid")
    assert unrotated["no_rope_freq"] == [0, 0, 0, 0, 0, 0, 1, 1] * 3
    assert as_gpt_args(unrotated)["no_rope_freq"] == [0, 0, 0, 1] * 3


def test_arguments_describe_the_model_in_the_terms_of_gpt_too():
    for name in BOTH:
        dims = dims_of(config_of(CASES[name]))
        args = megatron_args(dims, "hybrid")
        assert as_gpt_args(args)["num_layers"] == dims.layers, name
        staged = with_stages(args["hybrid_layer_pattern"], Pipeline(2 * dims.layers, 2))
        assert staged.index("|") == dims.layers, name
        old = {key: value for key, value in args.items() if key != "hybrid_layer_pattern"}
        old |= {"hybrid_override_pattern": args["hybrid_layer_pattern"]}
        for same in (args, args | {"hybrid_layer_pattern": staged}, old):
            assert list(mismatches(dims, same)) == [], name


@pytest.mark.parametrize("pattern", ["*-" * 11, "-*" * 12, "*-" * 11 + "*E", "M" + "*-" * 12, "nonsense"])
def test_pattern_of_another_model_is_named(pattern):
    dims = dims_of(config_of(CASES["qwen2-tied"]))
    args = megatron_args(dims, "hybrid") | {"hybrid_layer_pattern": pattern}
    assert list(mismatches(dims, args)) == [("hybrid_layer_pattern", "*-" * 12, pattern)]


def test_stages_are_numbered_as_megatron_numbers_chunks():
    assert with_stages("*-*E*E*E/*E", Pipeline(8, 2, vpp=2)) == "*-|*E|*E|*E/*E"
    assert with_stages("*-*E*E*E", Pipeline(8, 2, last=3)) == "*-*E*|E*E"
    assert with_stages("*-*E", Pipeline(4)) == "*-*E"


@pytest.mark.parametrize("name", daily(GPT_ONLY, ("llama", "minimax_m2", "moonlight", "glm_moe_dsa-shared", "glm4")))
def test_a_model_that_only_gptmodel_holds_is_refused_by_name(releases, tmp_path, name):
    refusal(f"HybridModel.*{GPT_ONLY[name]}", convert, releases(name), tmp_path / "out", dialect="hybrid")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", daily(BOTH, DAILY))
def test_conversion_goes_between_hf_and_both_dialects_byte_for_byte(releases, converted, tmp_path, name):
    hf, gpt = releases(name), converted(name)
    convert(gpt, tmp_path / "hybrid", dialect="hybrid")
    convert(tmp_path / "hybrid", tmp_path / "back", dialect="mcore")
    convert(tmp_path / "hybrid", tmp_path / "exported")
    convert(hf, tmp_path / "direct", dialect="hybrid")
    assert models.content(tmp_path / "hybrid" / "release") == models.content(tmp_path / "direct" / "release")
    assert models.content(tmp_path / "hybrid" / "hf") == models.content(gpt / "hf")
    assert models.content(tmp_path / "back" / "release") == models.content(gpt / "release")
    shards = {file.name: file.read_bytes() for file in hf.glob("*.safetensors")}
    assert shards.items() <= models.content(tmp_path / "exported").items()
    assert is_hybrid(TorchDistCheckpoint(tmp_path / "hybrid" / "release").specs)


def test_inspect_says_which_class_it_holds_and_prints_its_arguments(releases, converted, tmp_path):
    convert(releases("glm4_moe"), tmp_path / "hybrid", dialect="hybrid")
    assert inspect(converted("glm4_moe"))["model"] == "GPTModel"
    assert inspect(tmp_path / "hybrid")["model"] == text_with(f"HybridModel {PATTERNS['glm4_moe']}")
    flags = launch_flags(model_arguments(tmp_path / "hybrid"))
    assert {f"--hybrid-layer-pattern '{PATTERNS['glm4_moe']}'", "--num-layers 24"} <= {*flags}
    assert not [flag for flag in flags if "moe-layer-freq" in flag]
    assert "pretrain_hybrid.py" in flags[-1]


def test_the_output_layers_extra_state_is_stored_also_where_the_embedding_is_tied(releases, tmp_path):
    convert(releases("qwen2-tied"), tmp_path / "hybrid", dialect="hybrid")
    found = TorchDistCheckpoint(tmp_path / "hybrid" / "release")
    assert "output_layer._extra_state/shard_0_1" in found.metadata.objects
    assert "output_layer.weight" not in found.specs
    assert "decoder.final_norm.weight" in found.specs


@pytest.mark.parametrize("name", daily(HELD, (*DAILY, "nemotron_h-latent")))
def test_hybridmodel_loads_it_strictly_and_computes_the_logits_of_the_reference(tmp_path, name):
    require_megatron()
    case, found = CASES[name], tuple(map(int, version("megatron-core").split(".")[:2]))
    if lacking := [what for what, since in needs_release(dims_of(config_of(CASES[name])), 1) if found < since]:
        pytest.skip(f"HybridModel of {found} lacks {lacking[0]}")
    model, added = save(name, case, tmp_path / "hf", torch.float32)
    convert(tmp_path / "hf", tmp_path / "hybrid", dialect="hybrid")
    answer = ask(tmp_path / "hf", tmp_path / "hybrid", tokens(), None)
    assert answer.unexpected == []
    assert [key for key in answer.missing if not NOT_WEIGHTS.fullmatch(key)] == []
    with torch.no_grad():
        assert far(answer.logits, case.reference(model, tokens())) < LINEAR.get(name, TOLERANCE)
        if case.mtp:
            assert far(answer.mtp, case.mtp(model, added, tokens())) < LINEAR.get(name, TOLERANCE)
