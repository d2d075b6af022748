"""Latent attention: its configs, of which every number matters, and the two names of its norms on disk."""

from __future__ import annotations

import filecmp
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CASES
from families.case import save
from families.mla import YARN
from families.table import config_of
from support import models
from support.fixture_types import PathOf
from support.megatron_saves import Save, save_with_megatron
from support.messages import text_with
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from ckptkit.app.api import convert
from ckptkit.converters.megatron.arguments import megatron_args
from ckptkit.converters.megatron.parallel import ParallelSizes, check_sizes
from ckptkit.converters.planner import dims_of, rules_of
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.verify.checks.witnesses.megatron import all_layers, right_slices, strict_load
from ckptkit.verify.core.check import Tally
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.witnesses.megatron import run as megatron_run
from ckptkit.verify.witnesses.megatron.run import run_megatron
from ckptkit.verify.witnesses.megatron.slices import Position, compare_slice
from ckptkit.verify.witnesses.process.interpreter import Interpreter

Config = dict[str, Any]
LAYER = "decoder.layers.11."
# As Transformer Engine's spec calls them, and as the local spec does.
NORMS = {
    "decoder.layers.2.mlp.linear_fc1.layer_norm_weight": "decoder.layers.2.pre_mlp_layernorm.weight",
    LAYER + "self_attention.linear_q_up_proj.layer_norm_weight": LAYER + "self_attention.q_layernorm.weight",
    LAYER + "self_attention.linear_kv_up_proj.layer_norm_weight": LAYER + "self_attention.kv_layernorm.weight",
}


def test_a_config_must_say_whether_queries_are_compressed() -> None:
    config = config_of(CASES["moonlight"])
    assert dims_of(config).mla == replace(dims_of(config_of(CASES["kimi_k2"])).mla, q_rank=None)
    with pytest.raises(CkptkitError, match="config.json has no 'q_lora_rank'"):
        dims_of({key: value for key, value in config.items() if key != "q_lora_rank"})


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "linear", "factor": 4.0}, "latent.*Megatron"),
        (YARN | {"attention_factor": 1.2}, "yarn with attention_factor 1.2 has no Megatron arguments"),
        (YARN | {"truncate": False}, "yarn with truncate False has no Megatron arguments"),
        (YARN | {"mscale_all_dim": 0}, "yarn with mscale 1.5 and mscale_all_dim 0 is not supported"),
        (YARN | {"mscale": None}, "yarn with mscale 0 and mscale_all_dim 0.7 is not supported"),
        (YARN | {"factor": None}, "has no 'factor'"),
        (YARN | {"original_max_position_embeddings": None}, "has no 'original_max_position_embeddings'"),
    ],
)
def test_rope_scaling_that_megatron_has_no_words_for(rope: Config, message: str) -> None:
    dims = dims_of(config_of(CASES["deepseek_v3"]) | {"rope_parameters": rope})
    with pytest.raises(CkptkitError, match=message):
        megatron_args(dims)


def test_yarn_settings_become_megatron_arguments() -> None:
    """Without a word on mscale, both sides multiply cosines and sines by 0.1 ln(factor) + 1."""
    said = {
        "rotary_scaling_factor": 8.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.5,
        "mscale_all_dim": 0.7,
    }
    assert megatron_args(dims_of(config_of(CASES["deepseek_v3"]))).items() >= {"rope_type": "yarn", **said}.items()
    silent = {key: value for key, value in YARN.items() if "mscale" not in key and "beta" not in key}
    args = megatron_args(dims_of(config_of(CASES["deepseek_v3"]) | {"rope_parameters": silent}))
    assert args.items() >= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}.items()
    assert (
        megatron_args(dims_of(config_of(CASES["moonlight"]))).items()
        >= {"rope_type": "rope", "rotary_scaling_factor": 1.0}.items()
    )


@pytest.fixture
def release(releases: PathOf) -> Path:
    return releases("deepseek_v3")


@pytest.fixture
def megatron(converted: PathOf) -> Path:
    return converted("deepseek_v3")


@pytest.fixture(scope="module")
def slimes(releases: PathOf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in slime's dialect."""
    path = tmp_path_factory.mktemp("slimes") / "megatron"
    convert(releases("deepseek_v3"), path, dialect="slime")
    return path


# What slime's exporter knows of a layer; it stops at any other name. Source: `megatron_to_hf/deepseekv3.py`.
EXPORTED = {
    *(f"self_attention.linear_{name}.weight" for name in ("proj", "q_down_proj", "q_up_proj", "kv_down_proj")),
    *(f"self_attention.linear_{name}.layer_norm_weight" for name in ("q_up_proj", "kv_up_proj")),
    *("self_attention.linear_kv_up_proj.weight", "input_layernorm.weight", "pre_mlp_layernorm.weight"),
    *(f"mlp.linear_{name}" for name in ("fc1.weight", "fc1.layer_norm_weight", "fc2.weight")),
    *(f"mlp.{part}.linear_{fc}.weight" for part in ("experts.experts", "shared_experts") for fc in ("fc1", "fc2")),
    *("mlp.router.weight", "mlp.router.expert_bias"),
}


def same_weights(release: Path, back: Path) -> bool:
    files = sorted(path.name for path in release.glob("*.safetensors"))
    return all(filecmp.cmp(release / file, back / file, shallow=False) for file in files) and bool(files)


def remove(metadata: Metadata, key: str) -> None:
    del metadata.state_dict_metadata[key]
    for index in [index for index in metadata.storage_data if index.fqn == key]:
        del metadata.storage_data[index]


def test_a_norm_has_both_its_names_on_disk_and_one_in_the_tensors(megatron: Path) -> None:
    checkpoint = TorchDistCheckpoint(megatron / "release")
    stored = checkpoint.metadata.tensors
    for engine, local in NORMS.items():
        assert [chunk.blob for chunk in stored[engine].chunks] == [chunk.blob for chunk in stored[local].chunks]
        assert engine in checkpoint.specs
        assert local not in checkpoint.specs
    # Both specs call these the same in layers of latent attention.
    for name in (LAYER + "pre_mlp_layernorm.weight", LAYER + "input_layernorm.weight"):
        assert name in checkpoint.specs
    assert LAYER + "mlp.linear_fc1.layer_norm_weight" not in stored
    assert LAYER + "self_attention.linear_qkv.layer_norm_weight" not in stored


@pytest.mark.parametrize("kept", ["engine", "local"])
def test_norm_under_either_name_is_read(
    release: Path, megatron: Path, copy_of: Callable[[Path], Path], tmp_path: Path, kept: str
) -> None:
    copy = copy_of(megatron)

    def change(metadata: Metadata) -> None:
        engine = [key for key in metadata.state_dict_metadata if key.endswith(".layer_norm_weight")]
        local = [
            key
            for key in metadata.state_dict_metadata
            if key.endswith((".q_layernorm.weight", ".kv_layernorm.weight"))
            or any(key == f"decoder.layers.{layer}.pre_mlp_layernorm.weight" for layer in range(3))
        ]
        assert len(engine) == len(local) == 2 * 13 + 3
        for key in local if kept == "engine" else engine:
            remove(metadata, key)

    models.edit_metadata(copy / "release", change)
    convert(copy, tmp_path / "back")
    assert same_weights(release, tmp_path / "back")


def test_two_names_of_one_norm_must_not_be_stored_apart(megatron: Path, copy_of: Callable[[Path], Path]) -> None:
    copy, wrong = copy_of(megatron), LAYER + "self_attention.q_layernorm.weight"

    def change(metadata: Metadata) -> None:
        (index,) = [index for index in metadata.storage_data if index.fqn == wrong]
        other = MetadataIndex(wrong.replace(".11.", ".10."), index.offset)
        metadata.storage_data[index] = metadata.storage_data[other]

    models.edit_metadata(copy / "release", change)
    with pytest.raises(CkptkitError, match="q_layernorm.weight.*linear_q_up_proj.layer_norm_weight"):
        _ = TorchDistCheckpoint(copy / "release").specs


def test_objects_that_either_spec_asks_for(megatron: Path) -> None:
    keys = set(TorchDistCheckpoint(megatron / "release").metadata.objects)
    linears = ("q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "proj")
    for module in (
        *(f"self_attention.linear_{name}" for name in linears),
        "self_attention.core_attention",
        "input_layernorm",
        "pre_mlp_layernorm",
    ):
        for layer in (LAYER, "mtp.layers.0.transformer_layer."):
            assert f"{layer}{module}._extra_state/shard_0_1" in keys


def test_megatron_save_comes_back_as_the_release(release: Path, megatron: Path, tmp_path: Path) -> None:
    """The local spec saves its own names, and the down projections in two parts, one a rank."""
    pytest.importorskip("megatron.core")
    save_with_megatron(
        [Save(HfCheckpoint(release).config, megatron / "release", tmp_path / "saved", ParallelSizes(tp=2, etp=2))],
        world=2,
    )
    stored = TorchDistCheckpoint(tmp_path / "saved" / "iter_0000010", hf=release).metadata.tensors
    assert not set(NORMS) & set(stored)
    assert set(NORMS.values()) <= set(stored)
    assert len(stored[LAYER + "self_attention.linear_kv_down_proj.weight"].chunks) == 2
    convert(tmp_path / "saved", tmp_path / "back", hf=release)
    assert models.unequal(tmp_path / "back", release) == []


@pytest.mark.usefixtures("served")
def test_every_rank_holds_its_slice(release: Path, megatron: Path) -> None:
    subject = Subject(megatron, release, options=VerifyOptions(tp=2, ep=2))
    tallies = [Tally() for _ in range(3)]
    assert [
        finding
        for check, tally in zip((strict_load, right_slices, all_layers), tallies, strict=True)
        for finding in check(subject, tally)
    ] == []
    by_name = [{seen.name: seen.elements for seen in report.tensors} for report in run_megatron(subject).reports]
    assert [one[LAYER + "self_attention.linear_kv_down_proj.weight"] for one in by_name] == [28 * 128] * 2
    assert [one[LAYER + "self_attention.linear_proj.weight"] for one in by_name] == [128 * 100] * 2
    assert [one[LAYER + "self_attention.linear_q_up_proj.layer_norm_weight"] for one in by_name] == [48] * 2


def test_slimes_dialect_has_only_names_that_its_exporter_knows(megatron: Path, slimes: Path) -> None:
    """A trainer's norms have one name: Transformer Engine's."""
    stored, both = (TorchDistCheckpoint(path / "release").metadata.tensors for path in (slimes, megatron))
    assert {key.partition(".layers.")[2].partition(".")[2] for key in stored if key.startswith("decoder.layers.")} == (
        EXPORTED
    )
    assert set(both) - set(stored) == {
        key for key in both if key.endswith((".q_layernorm.weight", ".kv_layernorm.weight"))
    } | {f"decoder.layers.{layer}.pre_mlp_layernorm.weight" for layer in range(3)}


@pytest.mark.usefixtures("served")
def test_norms_by_transformer_engines_names_alone_are_found_by_megatrons_local_spec(
    release: Path, slimes: Path, copy_of: Callable[[Path], Path]
) -> None:
    """As a trainer saves them, but for one that was lost."""
    copy, lost = copy_of(slimes), LAYER + "self_attention.linear_kv_up_proj.layer_norm_weight"
    models.edit_metadata(copy / "release", lambda metadata: remove(metadata, lost))
    subject, tally = Subject(copy, release), Tally()
    (finding,) = strict_load(subject, tally)
    assert (finding.tensor, finding.actual) == (NORMS[lost], "not on disk")
    (note,) = tally.facts["notes"]
    assert note == text_with("CK401 Transformer")
    (unwritten,) = right_slices(subject, Tally())
    assert (unwritten.tensor, unwritten.actual) == (lost, text_with("load"))


def test_latent_attention_is_cut_by_heads() -> None:
    dims = dims_of(config_of(CASES["deepseek_v3"]))
    check_sizes(ParallelSizes(tp=2), dims)
    with pytest.raises(CkptkitError, match="10.*--tp 4"):
        check_sizes(ParallelSizes(tp=4), dims)


def test_down_projections_are_whole_with_transformer_engine_only() -> None:
    (rule,) = [
        rule
        for rule in rules_of(config_of(CASES["deepseek_v3"]))
        if rule.megatron == LAYER + "self_attention.linear_kv_down_proj.weight"
    ]
    whole = torch.arange(56 * 128, dtype=torch.float32).reshape(56, 128)
    engine, local = (Position(1, 2, 0, 1, range(12), local_spec) for local_spec in (False, True))
    assert compare_slice("x", rule, whole, whole, engine).verdict == "equal"
    assert compare_slice("x", rule, whole, whole[28:], local).verdict == "equal"
    assert compare_slice("x", rule, whole, whole[28:], engine).verdict == "differs"
    assert compare_slice("x", rule, whole, whole[:28], local).verdict == "differs"


def test_megatron_from_019_on_has_another_moonlight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `QKNormConfigResolver` puts a norm before linear_q_proj; what it loaded would be another model."""
    pytest.importorskip("megatron.core")
    save("moonlight", CASES["moonlight"], tmp_path / "release", torch.bfloat16)
    convert(tmp_path / "release", tmp_path / "megatron")
    monkeypatch.setattr(Interpreter, "release", lambda self, package: "0.19.0")
    with pytest.raises(CannotCheck, match="0.19.0.*linear_q_proj.*q_lora_rank"):
        megatron_run.run_megatron(Subject(tmp_path / "megatron", tmp_path / "release"))
