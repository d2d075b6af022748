"""CK108 and CK110: files that were mixed, lost or renamed, and adapters that were never merged."""

import json
import os
import shutil

import pytest
import torch
from mutations import edits
from safetensors.torch import load_file, save_file
from support import models
from support.forking import run_script
from support.messages import text_with
from transformers import AutoModelForCausalLM

from ckptkit.verify.run import verify

INDEX = "model.safetensors.index.json"


def write(path, files):
    path.mkdir()
    for number, file in enumerate(files):
        save_file({f"model.layers.{number}.weight": torch.ones(2)}, path / file)
    weight_map = {f"model.layers.{number}.weight": file for number, file in enumerate(files)}
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 8 * len(files)}, "weight_map": weight_map}))
    (path / "config.json").write_text("{}")
    return path


def names(numbers, total, stem="model-"):
    return [f"{stem}{number:05d}-of-{total}.safetensors" for number in numbers]


@pytest.mark.parametrize(
    "files",
    [
        names(range(1, 4), "000003"),  # DeepSeek-V3
        names(range(3), "00003"),  # slime
        names(range(4), "00003"),  # gpt-oss: 0 to 3 of 3
        names(range(1, 4), "00003", "model.safetensors-"),  # Qwen3.5
        [f"model-{number}-of-12.safetensors" for number in range(1, 13)],  # Kimi K2
        [*names(range(1, 3), "00002"), "mtp.safetensors"],
        ["part-a.safetensors", "part-b.safetensors"],
    ],
)
def test_shard_numbering_of_releases_is_accepted(files, tmp_path, passes):
    passes("CK108", write(tmp_path / "hf", files), len(files))


@pytest.mark.parametrize(
    ("files", "actual"),
    [
        # Megatron-Bridge #4188: 45 of 48 shards, and an index that agrees with the loss.
        (names([1, 2, 4, 7, 8], "00008"), "number {3,5..6} is missing"),
        ([*names([1, 2], "00003"), *names([3, 4], "00004")], "2 names with of-3 and 2 names with of-4"),
        (names([1, 2, 3, 5], "00003"), "number 5 is above 3"),
        ([*names([1, 2, 3], "00003"), "model-2-of-00003.safetensors"], "number 2 is repeated"),
    ],
)
def test_a_number_that_is_missing_from_files_and_index(files, actual, tmp_path, alone):
    path = write(tmp_path / "hf", files)
    (finding,) = alone("CK108", path)[1]
    assert (finding.actual, finding.severity, finding.file) == (actual, "error", str(path))


def test_a_shard_that_was_renamed(fresh, alone):
    path = fresh("qwen2-tied")
    first, _, shard, *_ = sorted(path.glob("*.safetensors"))
    shard.rename(path / "model-3.safetensors")
    (finding,) = alone("CK108", path)[1]
    assert (finding.file, finding.hint) == (str(shard), f"rename model-3.safetensors to {shard.name}")
    assert {finding.code for finding in verify(path).findings} == {"CK102", "CK104", "CK108"}
    first.unlink()
    assert [finding.file for finding in alone("CK108", path)[1]] == [str(shard)]


def test_shard_numbering_without_shards_is_not_checked(tmp_path, alone):
    (tmp_path / "config.json").write_text("{}")
    result, found = alone("CK108", tmp_path)
    assert (found, result and result.status) == ([], "skipped")


def test_an_adapter_that_verls_merger_left_below_is_a_note(fresh):
    path = fresh("qwen2-tied")
    assert "lora_adapter" not in str(verify(path).facts)
    (path / "lora_adapter").mkdir()
    (path / "lora_adapter" / "adapter_config.json").write_text("{}")
    report = verify(path)
    assert report.status == "passed"
    assert f"--source BASE --adapter {path / 'lora_adapter'}" in str(report.facts)


@pytest.mark.parametrize(
    "tensor",
    ["model.layers.{}.self_attn.q_proj.lora_A.default.weight", "base_model.model.model.layers.{}.mlp.up_proj.weight"],
)
def test_tensors_of_an_adapter(tensor, fresh, alone):
    path = fresh("qwen2-tied")
    edits.replace(path, {tensor.format(layer): torch.ones(2) for layer in range(12)})
    (finding,) = alone("CK110", path)[1]
    assert (finding.tensor, finding.count) == (tensor.format("{0..11}"), 12)


def test_adapters_of_megatron(fresh_megatron, alone):
    path = fresh_megatron("qwen2-tied") / "release"
    module = "decoder.layers.3.self_attention.linear_proj"
    name = f"{module}.adapter.linear_in.weight"

    def change(metadata):
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata[f"{module}.weight"]
        index = next(index for index in metadata.storage_data if index.fqn == f"{module}.weight")
        metadata.storage_data[type(index)(name, index.offset, 0)] = metadata.storage_data[index]

    models.edit_metadata(path, change)
    (finding,) = alone("CK110", path.parent)[1]
    assert (finding.tensor, finding.file) == (name, str(path))


# Two sets of weights in one directory: who reads which, as transformers and SGLang themselves do, and no loss.


SINGLE, NORM = "model.safetensors", "model.norm.weight"
KEEP = "trained"
# The files that SGLang's loader chooses in a directory.
SGLANG = """
import json, sys
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_loader import loader
loader.get_server_args = lambda: None
for path in sys.argv[1:]:
    found = loader.DefaultModelLoader(LoadConfig())._prepare_weights(path, None, True)[1]
    print("files", json.dumps(sorted(file.rpartition("/")[2] for file in found)))
"""


@pytest.fixture
def both(fresh):
    """Shards with an index, and a newer model.safetensors: what `save_pretrained` with larger shards leaves behind."""
    path = fresh("qwen2-tied")
    trained = {name: tensor + 1 if name == NORM else tensor for name, tensor in models.tensors(path).items()}
    save_file(trained, path / SINGLE, metadata={"format": "pt"})
    for file in path.glob("*-of-*.safetensors"):
        os.utime(file, (1_700_000_000, 1_700_000_000))
    os.utime(path / SINGLE, (1_750_000_000, 1_750_000_000))
    return path


def test_each_reader_is_said_to_take_its_own_and_nothing_to_be_deleted(both, releases, only):
    finding = only(verify(both))
    assert (finding.code, finding.severity, finding.file) == ("CK104", "error", str(both / SINGLE))
    assert f"last modified: {SINGLE} (2025-06-15 15:06:40 UTC)" in finding.actual
    assert finding.hint == text_with(KEEP)
    os.utime(both / SINGLE, (1_600_000_000, 1_600_000_000))
    actual = only(verify(both)).actual
    assert f"last modified: {SINGLE}" not in actual
    assert "(2023-11-14 22:13:20 UTC)" in actual
    held = AutoModelForCausalLM.from_pretrained(both, dtype=torch.bfloat16).state_dict()[NORM]
    assert torch.equal(held, models.tensors(releases("qwen2-tied"))[NORM] + 1)  # transformers takes the single file


@pytest.mark.sglang
def test_sglang_takes_the_shards_and_without_an_index_every_file(both, tmp_path, only):
    without_index = tmp_path / "one"
    models.save("qwen2-tied", without_index, shard_size="1GB")
    shutil.copy(without_index / SINGLE, without_index / "old.safetensors")
    printed = run_script("sglang", SGLANG, both, without_index)
    chosen = [json.loads(line.removeprefix("files ")) for line in printed.splitlines() if line.startswith("files ")]
    shards = {edits.shard_of(both, name).name for name in edits.names(both, "")}
    assert chosen == [sorted(shards), [SINGLE, "old.safetensors"]]
    finding = only(verify(without_index))
    assert finding.actual == text_with(f"SGLang old.safetensors transformers {SINGLE} modified")
    assert finding.hint == text_with(KEEP)


@pytest.mark.parametrize("lone", [False, True])
def test_tensor_in_two_shards(lone, fresh):
    """The index names one copy; the other file is only to be moved if nothing else that is needed is in it."""
    path = fresh("qwen2-tied")
    home = edits.shard_of(path, NORM)
    other = path / "copy.safetensors" if lone else edits.shard_of(path, "model.embed_tokens.weight")
    save_file({**({} if lone else load_file(other)), NORM: edits.tensor(path, NORM)}, other)
    os.utime(home, (1_700_000_000, 1_700_000_000))
    if lone:
        edits.edit_index(path, lambda weight_map: weight_map.update(another=other.name))
    (found,) = (one for one in verify(path).findings if one.tensor == NORM and one.code == "CK104")
    stored = set(found.actual.partition("; ")[0].removeprefix("stored in ").split(" and "))
    assert stored == {home.name, other.name}
    assert f"; the index names {home.name}; last modified: {other.name} (" in found.actual
    assert found.hint.startswith(f"move {other.name} elsewhere" if lone else f"write {other.name} again")
    assert found.hint == text_with(KEEP)
