"""Nemotron-H: layers of one block each, which only Megatron's HybridModel holds. Expectations are written by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CASES, table
from families.case import build, far, save
from families.nemotron_h import PATTERN
from support import models

from ckptkit.app.api import convert, inspect, model_arguments
from ckptkit.converters.megatron.arguments import launch_flags, megatron_args
from ckptkit.converters.planner import dims_of, own_dialect, rules_of
from ckptkit.core.errors import CkptkitError
from ckptkit.core.installation import package_release
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.quant.engines.transformers_class import unlike_transformers
from ckptkit.verify.checks.config.arguments import differing, mismatches

LATENT = "nemotron_h-latent"


def config_of(name: str = LATENT, **changes: Any) -> dict[str, Any]:
    """config.json of a test model with changes."""
    return table.config_of(CASES[name], **changes)


def test_an_mtp_layer_is_a_stack_whose_blocks_the_release_numbers() -> None:
    rules = {rule.megatron: set(rule.hf) for rule in rules_of(config_of(num_nextn_predict_layers=2))}
    assert rules["mtp.layers.1.enorm.weight"] == {"mtp.layers.2.enorm.weight"}
    assert rules["mtp.layers.1.eh_proj.weight"] == {"mtp.layers.2.eh_proj.weight"}
    assert rules["mtp.layers.1.final_layernorm.weight"] == {"mtp.layers.3.final_layernorm.weight"}
    inner = "mtp.layers.1.mtp_model_layer.layers."
    assert rules[inner + "0.self_attention.linear_proj.weight"] == {"mtp.layers.2.mixer.o_proj.weight"}
    assert rules[inner + "1.mlp.experts.experts.4.linear_fc1.weight"] == {"mtp.layers.3.mixer.experts.4.up_proj.weight"}


def test_every_spelling_of_the_pattern_is_read() -> None:
    words = config_of("nemotron_h", hybrid_override_pattern=..., num_hidden_layers=...)
    kinds = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
    later = kinds | {"M": "linear_attention", "*": "full_attention"}
    for spelling in (kinds, later):
        config = words | {"layers_block_type": [spelling[letter] for letter in PATTERN]}
        assert dims_of(config) == dims_of(config_of("nemotron_h"))
    both = config_of("nemotron_h", layers_block_type=[kinds[letter] for letter in PATTERN])
    assert dims_of(both).pattern == PATTERN
    assert dims_of(config_of(mtp_layers_block_type=..., mtp_hybrid_override_pattern="*E")).mtp_pattern == "*E"
    assert dims_of(config_of(mtp_layers_block_type=...)).mtp_pattern == "*E"


@pytest.mark.parametrize("limit", [[0.0, float("inf")], [0, 1e308], [0.0, {"__float__": "Infinity"}], ...])
def test_every_spelling_of_no_limit_is_read(limit: Any) -> None:
    assert dims_of(config_of(time_step_limit=limit)).mamba is not None


def test_the_dialect_is_that_of_hybridmodel_and_no_other(tmp_path: Path) -> None:
    save(LATENT, CASES[LATENT], tmp_path / "hf", torch.bfloat16)
    assert own_dialect(config_of()) == "hybrid"
    for dialect in ("mcore", "slime"):
        with pytest.raises(CkptkitError, match="GPTModel.*mixer"):
            convert(tmp_path / "hf", tmp_path / "out", dialect=dialect)
    assert not (tmp_path / "out").exists()
    convert(tmp_path / "hf", tmp_path / "plain")
    convert(tmp_path / "hf", tmp_path / "named", dialect="hybrid")
    assert inspect(tmp_path / "plain")["model"] == f"HybridModel, layer pattern {PATTERN}/*E"
    specs = [TorchDistCheckpoint(tmp_path / path / "release").specs for path in ("plain", "named")]
    assert specs[0] == specs[1]


def test_the_norm_before_a_mixer_is_read_under_both_of_its_names(tmp_path: Path) -> None:
    """mcore-bridge's spec has a norm of its own there."""
    save(LATENT, CASES[LATENT], tmp_path / "hf", torch.bfloat16)
    convert(tmp_path / "hf", tmp_path / "megatron")
    release = tmp_path / "megatron" / "release"

    def apart(name: str) -> str:
        return name.replace("mixer.in_proj.layer_norm_weight", "norm.weight")

    def rename(metadata: Any) -> None:
        state = metadata.state_dict_metadata
        metadata.state_dict_metadata = {apart(key): value for key, value in state.items()}
        stored = metadata.storage_data
        metadata.storage_data = {replace(at, fqn=apart(at.fqn)): value for at, value in stored.items()}

    models.edit_metadata(release, rename)
    names = TorchDistCheckpoint(release).metadata.tensors
    assert "decoder.layers.0.norm.weight" in names
    assert "decoder.layers.0.mixer.in_proj.layer_norm_weight" not in names
    convert(tmp_path / "megatron", tmp_path / "back")
    assert models.unequal(tmp_path / "back", tmp_path / "hf") == []


def test_state_of_mixers_and_routers_keeps_its_dtype_whatever_is_asked_for(tmp_path: Path) -> None:
    save(LATENT, CASES[LATENT], tmp_path / "hf", torch.float32)
    tensors = models.tensors(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "megatron", dtype="bfloat16")
    convert(tmp_path / "megatron", tmp_path / "back")
    wide = ("A_log", ".D", "dt_bias", "e_score_correction_bias")
    for name, tensor in models.tensors(tmp_path / "back").items():
        expected = tensors[name] if name.endswith(wide) else tensors[name].bfloat16()
        assert torch.equal(tensor, expected), name
        assert tensor.dtype == expected.dtype, name


def test_transformers_is_a_reference_for_as_many_tokens_as_it_computes_together() -> None:
    """A mixer's output does not depend on how many that are. In transformers 5.12 it does."""
    mixer = build("nemotron_h", CASES["nemotron_h"], torch.float32).model.layers[0].mixer
    hidden = torch.randn(1, 40, 128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together, apart = (mixer(hidden) for mixer.chunk_size in (64, 16))
    reasons = [unlike_transformers(config_of(), tokens) for tokens in (128, 129)]
    if package_release("transformers") < (5, 17):
        assert far(apart, together) > 1e-2
        assert (reasons[0], "right for 128 tokens at most" in str(reasons[1])) == (None, True)
    else:
        assert far(apart, together) < 1e-5
        assert reasons == [None, None]


def test_arguments_of_a_launch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of()))
    lines = launch_flags(model_arguments(tmp_path))
    expected = [f"--hybrid-layer-pattern '{PATTERN}/*E'", "--num-layers 13", "--position-embedding-type none"]
    expected += ["--squared-relu", "--mtp-num-layers 1", "--mamba-state-dim 18", "--mamba-head-dim 20"]
    expected += ["--mamba-num-groups 4", "--mamba-num-heads 12", "--moe-latent-size 80"]
    assert [line for line in expected if line not in lines] == []
    assert not [line for line in lines if "rotary" in line or "swiglu" in line or "layer-freq" in line]
    assert "pretrain_hybrid.py builds HybridModel" in lines[-1]


@pytest.mark.parametrize("pattern", [PATTERN[::-1] + "/*E", "*-" * 6 + "/*E", None])
def test_another_pattern_is_named(pattern: str | None) -> None:
    dims = dims_of(config_of())
    args = megatron_args(dims) | {"hybrid_layer_pattern": pattern}
    assert [name for name, _, _ in mismatches(dims, args)] == ["hybrid_layer_pattern"]


def test_two_runs_of_other_patterns_differ() -> None:
    args = megatron_args(dims_of(config_of()))
    other = args | {"hybrid_layer_pattern": "MM" + PATTERN[2:] + "/*E"}
    assert ("hybrid_layer_pattern", PATTERN, "MM" + PATTERN[2:]) in list(differing(args, other))
