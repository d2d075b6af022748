"""Nemotron-H: layers of one block each, which only Megatron's HybridModel holds. Expectations are written by hand."""

import json
from dataclasses import replace

import torch
from families import CASES
from families.case import build, far, save
from families.nemotron_h import PATTERN
from families.table import config_of
from support import models
from support.messages import refusal

from ckptkit.app.api import convert, inspect, model_arguments
from ckptkit.converters.megatron.arguments import launch_flags, megatron_args
from ckptkit.converters.planner import default_dialect, dims_of, rules_of
from ckptkit.core.installation import package_release
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.quant.engines.transformers_class import transformers_deviation
from ckptkit.verify.checks.config.arguments import differing

LATENT = "nemotron_h-latent"
CONFIG = config_of(CASES[LATENT])


def test_an_mtp_layer_is_a_stack_whose_blocks_the_release_numbers():
    rules = {rule.megatron: set(rule.hf) for rule in rules_of(CONFIG | {"num_nextn_predict_layers": 2})}
    inner = "mtp_model_layer.layers."
    for megatron, hf in {
        "enorm": "2.enorm",
        "eh_proj": "2.eh_proj",
        "final_layernorm": "3.final_layernorm",
        f"{inner}0.self_attention.linear_proj": "2.mixer.o_proj",
        f"{inner}1.mlp.experts.experts.4.linear_fc1": "3.mixer.experts.4.up_proj",
    }.items():
        assert rules[f"mtp.layers.1.{megatron}.weight"] == {f"mtp.layers.{hf}.weight"}


def test_the_dialect_is_that_of_hybridmodel_and_no_other(releases, converted, tmp_path):
    assert default_dialect(CONFIG) == "hybrid"
    for dialect in ("mcore", "slime"):
        refusal("GPTModel.*mixer", convert, releases(LATENT), tmp_path / "out", dialect=dialect)
    assert not (tmp_path / "out").exists()
    convert(releases(LATENT), tmp_path / "named", dialect="hybrid")
    assert inspect(converted(LATENT))["model"] == f"HybridModel, layer pattern {PATTERN}/*E"
    plain, named = (TorchDistCheckpoint(path / "release").specs for path in (converted(LATENT), tmp_path / "named"))
    assert plain == named


def test_the_norm_before_a_mixer_is_read_under_both_of_its_names(releases, converted, copy_of, tmp_path):
    """mcore-bridge's spec has a norm of its own there."""
    megatron = copy_of(converted(LATENT))

    def apart(name):
        return name.replace("mixer.in_proj.layer_norm_weight", "norm.weight")

    def rename(metadata):
        state, stored = metadata.state_dict_metadata, metadata.storage_data
        metadata.state_dict_metadata = {apart(key): value for key, value in state.items()}
        metadata.storage_data = {replace(at, fqn=apart(at.fqn)): value for at, value in stored.items()}

    models.edit_metadata(megatron / "release", rename)
    assert "decoder.layers.0.norm.weight" in TorchDistCheckpoint(megatron / "release").metadata.tensors
    convert(megatron, tmp_path / "back")
    assert models.unequal(tmp_path / "back", releases(LATENT)) == []


def test_state_of_mixers_and_routers_keeps_its_dtype_whatever_is_asked_for(tmp_path):
    save(LATENT, CASES[LATENT], tmp_path / "hf", torch.float32)
    convert(tmp_path / "hf", tmp_path / "megatron", dtype="bfloat16")
    convert(tmp_path / "megatron", tmp_path / "back")
    wide = ("A_log", ".D", "dt_bias", "e_score_correction_bias")
    tensors = models.tensors(tmp_path / "hf")
    expected = {name: one if name.endswith(wide) else one.bfloat16() for name, one in tensors.items()}
    assert models.unequal(tmp_path / "back", expected) == []


def test_transformers_is_a_reference_for_as_many_tokens_as_it_computes_together():
    """A mixer's output does not depend on how many that are. In transformers 5.12 it does."""
    mixer = build("nemotron_h", CASES["nemotron_h"], torch.float32).model.layers[0].mixer
    hidden = torch.randn(1, 40, 128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together, apart = (mixer(hidden) for mixer.chunk_size in (64, 16))
    reasons = [transformers_deviation(CONFIG, tokens) for tokens in (128, 129)]
    wrong = package_release("transformers") < (5, 17)
    assert (far(apart, together) > 1e-2, far(apart, together) < 1e-5) == (wrong, not wrong)
    assert (reasons[0], "128" in str(reasons[1])) == (None, wrong)


def test_arguments_of_a_launch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    lines = launch_flags(model_arguments(tmp_path))
    expected = [f"--hybrid-layer-pattern '{PATTERN}/*E'", "--num-layers 13", "--position-embedding-type none"]
    expected += ["--squared-relu", "--mtp-num-layers 1", "--mamba-state-dim 18", "--mamba-head-dim 20"]
    expected += ["--mamba-num-groups 4", "--mamba-num-heads 12", "--moe-latent-size 80"]
    assert [line for line in expected if line not in lines] == []
    assert not [line for line in lines if "rotary" in line or "swiglu" in line or "layer-freq" in line]
    assert "pretrain_hybrid.py" in lines[-1]
    args, other = megatron_args(dims_of(CONFIG)), "MM" + PATTERN[2:]
    differences = list(differing(args, args | {"hybrid_layer_pattern": f"{other}/*E"}))
    assert ("hybrid_layer_pattern", PATTERN, other) in differences
