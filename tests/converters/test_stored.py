"""Tensors that a release stores otherwise than transformers saves them, and saves that are not the release's."""

import filecmp
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import CASES
from families.case import save
from families.mtp import small
from families.table import config_of
from releases.record import load
from support import models
from support.messages import refusal
from support.nightly import daily

from ckptkit.app.api import convert, quantize
from ckptkit.converters.config.values import language_part
from ckptkit.converters.experts import fuse, is_fused, unfuse
from ckptkit.converters.megatron.arguments import megatron_args
from ckptkit.converters.open import open_checkpoint
from ckptkit.converters.planner import dims_of, expected_hf, to_megatron
from ckptkit.converters.registry import family_of
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.formats.hf.side_files import write_config
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.run import verify

FUSED = {
    "mixtral": "model.layers.0.mlp.experts.gate_up_proj",
    "minimax_m2": "model.layers.0.mlp.experts.gate_up_proj",
    "exaone_moe": "model.layers.2.mlp.experts.gate_up_proj",
    "nemotron_h": "model.layers.3.mixer.experts.up_proj",
}


@pytest.mark.parametrize("name", daily(FUSED, ["mixtral", "nemotron_h"]))
def test_experts_under_names_that_only_transformers_v5_has_are_refused(tmp_path, name):
    save(name, CASES[name], tmp_path / "v5", torch.bfloat16, fused=True)
    assert FUSED[name] in HfCheckpoint(tmp_path / "v5").specs
    error = refusal(f"transformers v5.*{name}", convert, tmp_path / "v5", tmp_path / "megatron")
    assert "save_original_format=True" in str(error.hint)


def test_experts_of_qwen3_vl_as_transformers_saves_them_are_refused(tmp_path):
    """The release stores [experts, hidden, 2 x ffn], transformers [experts, 2 x ffn, hidden] under the same names."""
    save("vl", replace(small(CASES["qwen3_vl_moe"], 4), stored=None), tmp_path / "hf", torch.bfloat16)
    with pytest.raises(CkptkitError, match=r"experts\.0\.gate_proj\.weight \[64, 192\] bfloat16.*\[96, 128\]"):
        convert(tmp_path / "hf", tmp_path / "megatron")


@pytest.mark.parametrize(
    ("name", "shape", "axes"),
    [("gate_up_proj", (12, 192), "2 axes.* 3"), ("gate_up_proj_bias", (12, 192, 1), "3 axes.* 2")],
)
def test_fused_experts_with_other_axes_are_refused(name, shape, axes):
    config = load("openai/gpt-oss-20b").config
    source = models.InMemory(config, {f"a.mlp.experts.{name}": torch.zeros(shape)})
    refusal(axes, unfuse, source.specs, config, "here")


def test_int4_experts_that_no_reader_knows_one_by_one_are_refused(releases, converted, tmp_path):
    scheme = QuantScheme(32, "qmax7")
    refusal("INT4 gpt_oss", quantize, releases("gpt_oss"), tmp_path / "int4", scheme)
    refusal("INT4 gpt_oss", convert, converted("gpt_oss"), tmp_path / "int4", quantize=scheme)


def test_experts_are_fused_only_where_the_release_has_them_so():
    """Qwen3.5 has the decoder's in one tensor and the MTP layer's one by one; Qwen3.6 all in one."""
    config = config_of(CASES["qwen3_5_moe"])
    specs = {name: TensorSpec(name, shape, "bfloat16") for name, shape in expected_hf(config).items()}
    parts = ("gate_up_proj", "down_proj")
    decoder = [f"model.language_model.layers.{layer}.mlp.experts.{part}" for layer in range(12) for part in parts]
    mtp = [f"mtp.layers.0.mlp.experts.{part}" for part in parts]
    for release, expected in (
        (decoder[:1], decoder),
        (mtp[:1], mtp),
        ([decoder[0], mtp[0]], decoder + mtp),
        ([], decoder + mtp),
    ):
        plan = fuse(specs, config, "the model", release)
        found = [spec.name for step in plan.steps for spec in step.outputs if is_fused([spec.name])]
        assert sorted(found) == sorted(expected)


def test_minimax_tensors_of_multi_token_prediction_are_refused(releases, tmp_path):
    """Its config promises layers that no release has."""
    extra = "model.layers.12.self_attn.q_norm.weight"
    assert HfCheckpoint(releases("minimax_m2")).config["use_mtp"]
    to_megatron(HfCheckpoint(releases("minimax_m2")), "this release")
    more = replace(CASES["minimax_m2"], added=lambda model, dtype: {extra: torch.ones(320, dtype=dtype)})
    save("minimax_m2", more, tmp_path / "more", torch.bfloat16)
    refusal(re.escape(extra), to_megatron, HfCheckpoint(tmp_path / "more"), "this release")


def test_rows_of_queries_keys_and_values_of_ling_are_put_in_groups(releases):
    """10 heads of 32 in two groups: the release has all queries, then all keys, then all values."""
    path = releases("bailing_moe")
    hf, view = models.tensors(path), to_megatron(open_checkpoint(path), "the test model")
    name = "decoder.layers.4.self_attention.linear_qkv.weight"
    stored = hf["model.layers.4.attention.query_key_value.weight"]
    assert stored.shape == (448, 128)
    places = [(0, 160), (320, 352), (384, 416), (160, 320), (352, 384), (416, 448)]
    assert torch.equal(view.read([name])[name], torch.cat([stored[first:last] for first, last in places]))


def test_the_thinker_of_qwen3_omni_is_the_same_model_alone_and_inside():
    whole = config_of(CASES["qwen3_omni_moe"])
    alone = {**whole["thinker_config"], "model_type": "qwen3_omni_moe_thinker"}
    found, shorter = dims_of(whole), dims_of(alone)
    assert (found.root, found.head) == ("thinker.model.", "thinker.lm_head.weight")
    assert (shorter.root, shorter.head) == ("model.", "lm_head.weight")
    assert megatron_args(found) == megatron_args(shorter)
    assert megatron_args(found)["rotary_interleaved"] is False  # whatever `interleaved` says of the three axes
    assert language_part(whole) == language_part(alone) == whole["thinker_config"]["text_config"]
    family = family_of(whole)
    assert all(
        map(family.passes_through, ("thinker.audio_tower.x", "thinker.visual.x", "talker.codec_head.x", "code2wav.x"))
    )
    assert not family.passes_through("thinker.model.norm.weight")


def test_a_written_config_states_the_dtype_where_the_release_does(tmp_path):
    """Nowhere at the top; null in the text_config of the releases stays null."""
    config = config_of(CASES["qwen3_omni_moe"])
    config["thinker_config"] |= {"dtype": "bfloat16"}
    config["thinker_config"]["text_config"] |= {"dtype": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_config(tmp_path, config, {"x": TensorSpec("x", (2,), "float32")})
    config["thinker_config"]["dtype"] = "float32"
    assert json.loads((tmp_path / "config.json").read_text()) == config


# There and back under other circumstances than those that test_families.py puts every family through


def test_convert_back_from_a_moved_iteration_needs_hf(releases, converted, tmp_path):
    moved = Path(shutil.copytree(converted("qwen3_moe") / "release", tmp_path / "run" / "iter_0000007"))
    refusal("HF.*stored", convert, moved, tmp_path / "back")
    convert(moved, tmp_path / "back", hf=releases("qwen3_moe"))
    assert models.unequal(tmp_path / "back", releases("qwen3_moe")) == []


def test_convert_of_a_single_file_without_an_index_comes_back(tmp_path):
    models.save("qwen2-tied", tmp_path / "hf", shard_size="1GB")
    assert not (tmp_path / "hf/model.safetensors.index.json").exists()
    convert(tmp_path / "hf", tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back")
    assert filecmp.cmp(tmp_path / "hf/model.safetensors", tmp_path / "back/model.safetensors", shallow=False)
    assert not (tmp_path / "back/model.safetensors.index.json").exists()


@pytest.mark.parametrize("way", ["back to HF", "to INT4"])
def test_max_shard_size_cuts_files_anew(way, releases, converted, tmp_path):
    """Whatever the release's own shards are; a file that holds more holds one tensor."""
    if way == "back to HF":
        convert(converted("qwen2-tied"), tmp_path / "out", max_shard_size=300_000)
        assert models.unequal(tmp_path / "out", releases("qwen2-tied")) == []
    else:
        quantize(releases("qwen2-tied"), tmp_path / "out", QuantScheme(32, "qmax7"), max_shard_size=300_000)
    out, before = HfCheckpoint(tmp_path / "out"), HfCheckpoint(releases("qwen2-tied"))
    assert len(out.layout) > len(before.layout)
    assert all(
        sum(out.specs[name].nbytes for name in names) <= 300_000 or len(names) == 1 for names in out.layout.values()
    )


def test_dtype_changes_all_but_fp32_state_and_config_says_so(releases, tmp_path):
    convert(releases("glm4_moe"), tmp_path / "megatron", dtype="float32")
    convert(tmp_path / "megatron", tmp_path / "back")
    before = models.tensors(releases("glm4_moe"))
    assert models.unequal(tmp_path / "back", {key: tensor.float() for key, tensor in before.items()}) == []
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "float32"
    convert(tmp_path / "megatron", tmp_path / "half", dtype="bfloat16")
    assert models.unequal(tmp_path / "half", before) == []
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"


NAME = "model.layers.{}.self_attn.rotary_emb.inv_freq"


def frequencies(model, dtype):
    """Those that the model computes with, once a layer, in float32."""
    return {
        NAME.format(layer): model.model.rotary_emb.inv_freq.float() for layer in range(model.config.num_hidden_layers)
    }


@pytest.mark.parametrize("name", daily(("llama", "mistral", "mixtral", "qwen2-untied"), ("mixtral",)))
def test_rotary_frequencies_come_back_from_megatron_and_stay_beside_int4_weights(name, tmp_path):
    release = tmp_path / "release"
    save(name, replace(CASES[name], added=frequencies), release, torch.bfloat16)
    convert(release, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back")
    assert models.unequal(tmp_path / "back", release) == []
    quantize(release, tmp_path / "int4", QuantScheme(32, "qmax7"))
    for path in (release, tmp_path / "megatron", tmp_path / "int4"):
        report = verify(path, source=release)
        assert (report.findings, report.status) == ([], "passed")
    stored = NAME.format(3)
    assert torch.equal(models.tensors(tmp_path / "int4")[stored], models.tensors(release)[stored])
