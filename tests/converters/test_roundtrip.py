"""HF -> Megatron -> HF under other circumstances than those that test_families.py puts every family through."""

import filecmp
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import CASES
from families.case import save
from support import models
from support.nightly import daily

from ckptkit.app.api import convert, quantize
from ckptkit.converters.planner import to_hf
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.run import verify


def test_convert_back_from_a_moved_iteration_needs_hf(releases, converted, tmp_path):
    moved = Path(shutil.copytree(converted("qwen3_moe") / "release", tmp_path / "run" / "iter_0000007"))
    with pytest.raises(CkptkitError, match="HF.*stored"):
        convert(moved, tmp_path / "back")
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


def test_padded_vocabulary_is_cut_to_the_config(releases, converted):
    source = TorchDistCheckpoint(converted("qwen2-untied") / "release")
    tensors = source.read(list(source.specs))
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        tensors[name] = torch.cat([tensors[name], torch.zeros(32, 128, dtype=torch.bfloat16)])
    view = to_hf(models.InMemory(source.config, tensors), "padded")
    expected = models.tensors(releases("qwen2-untied"))
    found = view.read(["model.embed_tokens.weight", "lm_head.weight"])
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


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
