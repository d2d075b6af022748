"""Latent attention: its norms' two names on disk, its indexer, and what ranks of real Megatron hold and save."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch
from families import CASES
from families.table import config_of
from support import models
from support.installed import require_megatron
from support.megatron_saves import Save, save_with_megatron
from support.messages import text_with
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckptkit.app.api import convert
from ckptkit.converters.megatron.arguments import megatron_args
from ckptkit.converters.megatron.parallel import ParallelSizes
from ckptkit.converters.planner import dims_of, rules_of
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.verify.checks.config.arguments import mismatches
from ckptkit.verify.checks.witnesses.megatron import all_layers, right_slices, strict_load
from ckptkit.verify.core.check import CheckResult
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.witnesses.megatron.run import run_megatron
from ckptkit.verify.witnesses.megatron.slices import Position, compare_slice
from ckptkit.verify.witnesses.process.interpreter import Interpreter

LAYER = "decoder.layers.11."
# As Transformer Engine's spec calls them, and as the local spec does.
NORMS = {
    "decoder.layers.2.mlp.linear_fc1.layer_norm_weight": "decoder.layers.2.pre_mlp_layernorm.weight",
    LAYER + "self_attention.linear_q_up_proj.layer_norm_weight": LAYER + "self_attention.q_layernorm.weight",
    LAYER + "self_attention.linear_kv_up_proj.layer_norm_weight": LAYER + "self_attention.kv_layernorm.weight",
}


@pytest.fixture
def release(releases):
    return releases("deepseek_v3")


@pytest.fixture
def megatron(converted):
    return converted("deepseek_v3")


def remove(metadata, key):
    del metadata.state_dict_metadata[key]
    for index in [index for index in metadata.storage_data if index.fqn == key]:
        del metadata.storage_data[index]


def test_a_norm_has_both_its_names_on_disk_and_one_in_the_tensors(megatron):
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
def test_norm_under_either_name_is_read(release, megatron, copy_of, tmp_path, kept):
    copy = copy_of(megatron)

    def change(metadata):
        engine = [key for key in metadata.state_dict_metadata if key.endswith(".layer_norm_weight")]
        dense = [f"decoder.layers.{layer}.pre_mlp_layernorm.weight" for layer in range(3)]
        local = [
            key for key in metadata.state_dict_metadata if key.endswith(("q_layernorm.weight", "kv_layernorm.weight"))
        ]
        local += dense
        assert len(engine) == len(local) == 2 * 13 + 3
        for key in local if kept == "engine" else engine:
            remove(metadata, key)

    models.edit_metadata(copy / "release", change)
    convert(copy, tmp_path / "back")
    assert models.unequal(tmp_path / "back", release) == []


def test_two_names_of_one_norm_must_not_be_stored_apart(megatron, copy_of):
    copy, wrong = copy_of(megatron), LAYER + "self_attention.q_layernorm.weight"

    def change(metadata):
        (index,) = [index for index in metadata.storage_data if index.fqn == wrong]
        other = MetadataIndex(wrong.replace(".11.", ".10."), index.offset)
        metadata.storage_data[index] = metadata.storage_data[other]

    models.edit_metadata(copy / "release", change)
    with pytest.raises(CkptkitError, match="q_layernorm.weight.*linear_q_up_proj.layer_norm_weight"):
        _ = TorchDistCheckpoint(copy / "release").specs


def test_objects_that_either_spec_asks_for(megatron):
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


def test_megatron_save_comes_back_as_the_release(release, megatron, tmp_path):
    """The local spec saves its own names, and the down projections in two parts, one a rank."""
    require_megatron()
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
def test_every_rank_holds_its_slice(release, megatron):
    subject = Subject(megatron, release, options=VerifyOptions(tp=2, ep=2))
    assert [
        finding for check in (strict_load, right_slices, all_layers) for finding in check(subject, CheckResult("", ""))
    ] == []
    by_name = [{seen.name: seen.elements for seen in report.tensors} for report in run_megatron(subject).reports]
    assert [one[LAYER + "self_attention.linear_kv_down_proj.weight"] for one in by_name] == [28 * 128] * 2
    assert [one[LAYER + "self_attention.linear_proj.weight"] for one in by_name] == [128 * 100] * 2
    assert [one[LAYER + "self_attention.linear_q_up_proj.layer_norm_weight"] for one in by_name] == [48] * 2


@pytest.mark.usefixtures("served")
def test_norms_by_transformer_engines_names_alone_are_found_by_megatrons_local_spec(release, tmp_path):
    """As a trainer saves them, but for one that was lost."""
    slimes, lost = tmp_path / "slimes", LAYER + "self_attention.linear_kv_up_proj.layer_norm_weight"
    convert(release, slimes, dialect="slime")
    models.edit_metadata(slimes / "release", lambda metadata: remove(metadata, lost))
    subject, result = Subject(slimes, release), CheckResult("", "")
    (finding,) = strict_load(subject, result)
    assert (finding.tensor, finding.actual) == (NORMS[lost], "not stored")
    (note,) = result.facts["notes"]
    assert note == text_with("CK401 Transformer")
    (unwritten,) = right_slices(subject, CheckResult("", ""))
    assert (unwritten.tensor, unwritten.actual) == (lost, text_with("loading"))


def test_down_projections_are_whole_with_transformer_engine_only():
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


def test_megatron_from_019_on_has_another_moonlight(releases, converted, monkeypatch):
    """Its `QKNormConfigResolver` puts a norm before linear_q_proj; what it loaded would be another model."""
    require_megatron()
    monkeypatch.setattr(Interpreter, "release", lambda self, package: "0.19.0")
    with pytest.raises(CannotCheck, match="0.19.0.*linear_q_proj.*q_lora_rank"):
        run_megatron(Subject(converted("moonlight"), releases("moonlight")))


# The indexer of sparse attention


SINCE_0_19 = find_spec("megatron") is not None and tuple(map(int, version("megatron-core").split(".")[:2])) >= (0, 19)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa-shared"])
def test_slime_dialect(releases, converted, tmp_path, name):
    """slime's names and rows for whatever the indexer is made of, and the same release again."""
    convert(releases(name), tmp_path / "megatron", dialect="slime")
    slime, mcore = (TorchDistCheckpoint(path / "release") for path in (tmp_path / "megatron", converted(name)))
    sizes = dims_of(config_of(CASES[name])).indexer
    places = [f"decoder.layers.{layer}." for layer in sizes.layers] + ["mtp.layers.0.transformer_layer."]
    names = {f"linear_{name}.weight": f"{name}.weight" for name in ("wq_b", "wk", "weights_proj")}
    names |= {name: name for name in ("k_norm.weight", "k_norm.bias")}
    renamed = {
        f"{at}self_attention.core_attention.indexer.{own}": f"{at}self_attention.{new}"
        for at in places
        for own, new in names.items()
    }
    assert {renamed.get(own, own) for own in mcore.specs} == set(slime.specs)
    before, after = mcore.read(list(renamed)), slime.read(list(renamed.values()))
    for own, new in renamed.items():
        released = before[own]
        if "weights_proj" not in own:
            released = torch.cat([part for head in released.split(64) for part in (head[16:], head[:16])])
        assert torch.equal(after[new], released), new
    convert(tmp_path / "megatron", tmp_path / "back")
    assert models.unequal(tmp_path / "back", releases(name)) == []


def test_every_rank_holds_the_whole_indexer(releases, converted):
    require_megatron()
    name = "glm_moe_dsa-shared"
    subject = Subject(converted(name), releases(name), options=VerifyOptions(tp=2, ep=2))
    if not SINCE_0_19:
        with pytest.raises(CannotCheck, match="0.19"):
            run_megatron(subject)
        return
    assert run_megatron(subject).failures == {}
    assert [finding for check in (strict_load, right_slices) for finding in check(subject, CheckResult("", ""))] == []
    for report in run_megatron(subject).reports:
        held = {seen.name: seen.elements for seen in report.tensors if ".indexer." in seen.name}
        assert len(held) == 6 * 5
        assert held["decoder.layers.10.self_attention.core_attention.indexer.linear_wq_b.weight"] == 14 * 64 * 48


def test_layers_that_share_have_no_rules():
    shared = {rule.megatron for rule in rules_of(config_of(CASES["glm_moe_dsa-shared"]))}
    every = {rule.megatron for rule in rules_of(config_of(CASES["glm_moe_dsa"]))}
    gone = {name for name in every - shared if ".indexer." in name}
    assert shared == every - gone
    assert {int(name.split(".")[2]) for name in gone} == {3, 4, 5, 7, 8, 9, 11}
    assert len(gone) == 7 * 5


def test_a_run_with_slimes_module_stores_no_size_of_it():
    dims = dims_of(config_of(CASES["deepseek_v32"]))
    args = megatron_args(dims, "slime")
    assert [name for name in args if "dsa" in name or "experimental" in name] == []
    none = {"dsa_indexer_n_heads": None, "experimental_attention_variant": None}
    assert list(mismatches(dims, args | none)) == []


def test_arguments_from_before_0_19_are_named_with_the_release():
    dims = dims_of(config_of(CASES["deepseek_v32"]))
    args = {name: value for name, value in megatron_args(dims).items() if name != "dsa_indexer_rope_interleaved"}
    ((argument, expected, actual),) = mismatches(dims, args)
    assert (argument, expected, "0.19" in actual) == ("dsa_indexer_rope_interleaved", "False", True)
