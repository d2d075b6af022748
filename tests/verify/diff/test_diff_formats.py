"""`diff` of checkpoints in every format: releases, quantized ones, what Megatron saves, and the command."""

import json
import shutil

import pytest
import torch
from mutations.edits import edit_config
from support import models
from support.processes import ckptkit as ckptkit_command
from support.tied import with_head

import ckptkit
from ckptkit import CkptkitError
from ckptkit.app.api import convert, quantize
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.diff.diff import diff
from ckptkit.verify.diff.text import diff_lines

UNKNOWN = {"model_type": "of no family"}


def test_checkpoint_against_its_conversion_is_equal(releases, converted):
    hf, megatron = releases("glm4_moe"), converted("glm4_moe")
    for a, b in (
        (hf, megatron),
        (megatron, hf),
        (megatron / "release", megatron),
        (hf, releases("glm4_moe", fused=True)),
    ):
        found = ckptkit.diff(a, b)
        assert (found.status, len(found.equal)) == ("equal", len(models.tensors(hf)))


def test_int4_against_its_source_differs_by_half_a_step_at_most(releases, tmp_path):
    quantize(releases("qwen3_moe"), tmp_path / "int4", QuantScheme(32, "qmax7"))
    convert(tmp_path / "int4", tmp_path / "megatron")
    for a, b in ((tmp_path / "int4", tmp_path / "megatron"), (tmp_path / "megatron", tmp_path / "int4")):
        assert diff(a, b).status == "equal"
    found = diff(tmp_path / "int4", releases("qwen3_moe"))
    plain = models.tensors(releases("qwen3_moe"))
    assert found.formats[0].startswith("HF, ")
    assert "dequantized" in found.formats[0]
    assert found.status == "different"
    assert found.counts["moved"] == found.counts["only_a"] == found.counts["only_b"] == 0
    assert all(name.endswith("_proj.weight") for name in (pair.name for pair in found.differing))
    for pair in found.differing:
        far, largest = pair.distance, float(plain[pair.name].float().abs().max())
        # A group's step is its largest weight / 7; rounding is half of it, and bfloat16 rounds the result.
        assert 0 < far.largest <= (largest / 7) * 0.52 + largest / 256
        assert far.cosine > 0.98


def test_tied_output_layer_stored_once_is_redundant_only_where_it_repeats_the_embedding(releases, tmp_path):
    plain = releases("qwen2-tied")
    repeated = with_head(plain, tmp_path / "repeated", "qwen2-tied")
    for a, b in ((repeated, plain), (plain, repeated)):
        found = diff(a, b)
        assert (found.status, list(found.redundant)) == ("equal", ["lm_head.weight"])
    stale = models.tensors(plain)["model.embed_tokens.weight"] + 1
    found = diff(with_head(plain, tmp_path / "stale", "qwen2-tied", stale), plain)
    assert (found.status, [pair.name for pair in found.only_a]) == ("different", ["lm_head.weight"])


def test_rounded_router_bias_is_noted(releases, fresh):
    path, name = fresh("glm4_moe"), "model.layers.4.mlp.gate.e_score_correction_bias"
    models.edit(path, name, models.tensors(path)[name].to(torch.bfloat16))
    found = diff(path, releases("glm4_moe"))
    assert found.status == "equal"
    assert [note for note in found.notes if name in note and "CK203" in note] != []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": 0.5}, "rms_norm_eps 0.5 and"),
        ({"rope_theta": 12345.0, "rope_parameters": None}, "rope_theta 12345 and"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False and True"),
        ({"sliding_window": 77, "use_sliding_window": True}, "sliding_window"),
    ],
)
def test_config_that_differs_is_a_difference(changes, words, releases, fresh):
    path = fresh("qwen2-tied")
    edit_config(path, **changes)
    found = diff(path, releases("qwen2-tied"))
    assert (found.status, found.counts["differing"]) == ("different", 0)
    (line,) = found.files
    assert line.startswith("config.json differs: ")
    assert words in line
    assert found.to_json()["files"] == [line]
    assert list(diff_lines(found))[-1].startswith("DIFFERENT")


@pytest.mark.parametrize("is_a", [True, False])
def test_code_that_only_one_side_has_is_a_difference(is_a, releases, fresh):
    path, release = fresh("qwen2-tied"), releases("qwen2-tied")
    (path / "modeling_x.py").write_text("x")
    edit_config(path, auto_map={"AutoModel": "modeling_x.C"})
    found = diff(path, release) if is_a else diff(release, path)
    assert found.status == "different"
    assert sorted(line.split()[0] for line in found.files) == ["config.json", "modeling_x.py"]


def test_models_of_no_family_are_compared_under_the_names_on_disk(releases, copy_of):
    path = copy_of(releases("glm4_moe", fused=True))
    edit_config(path, **UNKNOWN)
    found = diff(path, path)
    assert (found.status, len(found.equal)) == ("equal", len(models.tensors(path)))
    assert [note for note in found.notes if "of no family" in note] != []


def test_megatron_without_a_config_is_compared_under_the_names_on_disk(converted, fresh_megatron, releases):
    path = fresh_megatron("qwen2-tied")
    shutil.rmtree(path / "hf")
    found = diff(path, path)
    assert found.status == "equal"
    assert "decoder.layers.11.mlp.linear_fc2.weight" in found.equal
    assert [note for note in found.notes if "on disk" in note] != []
    for a, b in ((path, releases("qwen2-tied")), (releases("qwen2-tied"), path)):
        assert (diff(a, b).status, diff(a, b).notes) == ("equal", [])
    assert diff(path, converted("qwen2-tied"), hf=releases("qwen2-tied")).status == "equal"


def test_legacy_and_padded_checkpoints_are_compared_with_their_release(saved, releases):
    found = diff(saved / "legacy, two chunks a stage", releases("qwen2-tied"))
    assert (found.status, found.counts["equal"]) == ("equal", 146)
    assert found.formats == ("Megatron legacy (mp_rank_*)", "HF")
    found = diff(saved / "dense, layers stacked", releases("qwen2-untied"))
    assert (found.status, len([note for note in found.notes if "vocabulary" in note])) == ("equal", 1)


def test_files_that_loaders_read_are_differences_and_the_order_of_keys_is_none(releases, fresh):
    path = fresh("qwen2-tied")
    config = json.loads((path / "config.json").read_text())
    changed = dict(reversed((config | {"transformers_version": "4.51.0", "torch_dtype": "float16"}).items()))
    (path / "config.json").write_text(json.dumps(changed, indent=4))
    (path / "README.md").write_text("no loader reads it")
    assert diff(path, releases("qwen2-tied")).status == "equal"
    (path / "chat_template.jinja").write_text("{{ other }}")
    (path / "tokenizer.model").write_bytes(b"other")
    found = diff(path, releases("qwen2-tied"))
    assert found.status == "different"
    assert [line.split()[0] for line in found.files] == ["chat_template.jinja", "tokenizer.model"]


def test_what_cannot_be_compared_is_an_error(releases, fresh, fresh_megatron):
    path = fresh_megatron("glm4_moe")
    edit_config(path / "hf", **UNKNOWN)
    with pytest.raises(CkptkitError, match="of no family"):
        diff(path, releases("glm4_moe"))
    path = fresh("qwen2-tied")
    edit_config(path, quantization_config={"quant_method": "quanto"})
    with pytest.raises(CkptkitError, match="quanto"):
        diff(path, releases("qwen2-tied"))


def test_vision_tower_from_the_other_side_is_noted(releases, fresh_megatron):
    release, megatron = releases("qwen3_vl-tied"), fresh_megatron("qwen3_vl-tied")
    found = diff(release, megatron)
    assert (found.status, [note for note in found.notes if "not compared" in note]) == ("equal", [])
    shutil.rmtree(megatron / "hf")
    shutil.rmtree(megatron / "carried")
    found = diff(release, megatron)
    (note,) = (note for note in found.notes if "lacks them" in note)
    assert "visual." in note


def test_command_prints_verdict_or_json_and_exits_by_it(converted, fresh):
    path = fresh("qwen2-tied")
    name = "model.layers.3.mlp.up_proj.weight"
    models.edit(path, name, models.tensors(path)[name] * 2)
    done = ckptkit_command("diff", path, converted("qwen2-tied"))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "DIFFERENT  1 differing, of 146 tensors")
    done = ckptkit_command("diff", path, path, "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["schema"], report["status"]) == (0, "ckptkit-diff/1", "equal")
    assert report["counts"]["equal"] == 146
    shard = next(path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-8])
    done = ckptkit_command("diff", path, converted("qwen2-tied"))
    assert (done.returncode, done.stdout) == (2, "")
    assert shard.name in done.stderr
