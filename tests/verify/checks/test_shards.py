"""CK108 and CK110: files that were mixed, lost or renamed, and adapters that were never merged."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import models
from support.fixture_types import OnlyFinding, PathOf, RunAlone
from support.forking import run_script
from support.messages import text_with

from ckptkit.verify.run import verify

INDEX = "model.safetensors.index.json"


def write(path: Path, files: list[str]) -> Path:
    """A checkpoint with one small tensor a file, and an index of all of them."""
    path.mkdir()
    for number, file in enumerate(files):
        save_file({f"model.layers.{number}.weight": torch.ones(2)}, path / file)
    weight_map = {f"model.layers.{number}.weight": file for number, file in enumerate(files)}
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 8 * len(files)}, "weight_map": weight_map}))
    (path / "config.json").write_text("{}")
    return path


def names(numbers: Any, total: str, stem: str = "model-") -> list[str]:
    return [f"{stem}{number:05d}-of-{total}.safetensors" for number in numbers]


@pytest.mark.parametrize(
    "files",
    [
        names(range(1, 4), "00003"),
        names(range(1, 4), "000003"),  # DeepSeek-V3
        names(range(3), "00003"),  # slime
        names(range(4), "00003"),  # gpt-oss: 0 to 3 of 3
        names(range(1, 4), "00003", "model.safetensors-"),  # Qwen3.5
        [f"model-{number}-of-12.safetensors" for number in range(1, 13)],  # Kimi K2
        ["model.safetensors"],
        [*names(range(1, 3), "00002"), "mtp.safetensors"],
        ["part-a.safetensors", "part-b.safetensors"],
    ],
)
def test_shard_numbering_of_releases_is_accepted(files: list[str], tmp_path: Path, passes: Callable[..., None]) -> None:
    passes("CK108", write(tmp_path / "hf", files), len(files))


def test_a_number_that_is_missing_from_files_and_index(tmp_path: Path, alone: RunAlone) -> None:
    """Megatron-Bridge #4188: 45 of 48 shards, and an index that agrees with the loss."""
    path = write(tmp_path / "hf", names([1, 2, 4, 7, 8], "00008"))
    _, (finding,) = alone("CK108", path)
    assert (finding.expected, finding.actual) == ("8 shards model-*-of-8", "number {3,5..6} is missing")
    assert (finding.severity, finding.file) == ("error", str(path))


@pytest.mark.parametrize(
    ("files", "actual"),
    [
        (names([1, 2], "00003"), "number 3 is missing"),
        ([*names([1, 2], "00003"), *names([3, 4], "00004")], "2 of 3 and 2 of 4"),
        (names([1, 2, 3, 5], "00003"), "number 5 of 3"),
        ([*names([1, 2, 3], "00003"), "model-2-of-00003.safetensors"], "number 2 more than once"),
    ],
)
def test_numbers_that_are_missing_of_two_saves_beyond_the_last_or_twice(
    files: list[str], actual: str, tmp_path: Path, alone: RunAlone
) -> None:
    _, (finding,) = alone("CK108", write(tmp_path / "hf", files))
    assert finding.actual == actual


def test_a_shard_that_was_renamed(fresh: PathOf, alone: RunAlone) -> None:
    path = fresh("qwen2-tied")
    shard = sorted(path.glob("*.safetensors"))[2]
    shard.rename(path / "model-3.safetensors")
    _, (finding,) = alone("CK108", path)
    assert (finding.file, finding.hint) == (str(shard), f"rename model-3.safetensors to {shard.name}")
    assert {"CK102", "CK104", "CK108"} == {finding.code for finding in verify(path).findings}


def test_a_leftover_of_an_earlier_save_is_not_taken_for_a_renamed_shard(fresh: PathOf, alone: RunAlone) -> None:
    path = fresh("qwen2-tied")
    first, second, *_ = sorted(path.glob("*.safetensors"))
    second.rename(path / "old.safetensors")
    first.unlink()
    found = alone("CK108", path)[1]
    assert [finding.file for finding in found] == [str(second)]


def test_shard_numbering_without_shards_is_not_checked(tmp_path: Path, alone: RunAlone) -> None:
    (tmp_path / "config.json").write_text("{}")
    result, found = alone("CK108", tmp_path)
    assert (found, result and result.status) == ([], "skipped")


def test_an_adapter_that_verls_merger_left_below_is_a_note(fresh: PathOf) -> None:
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
def test_tensors_of_an_adapter(tensor: str, fresh: PathOf, alone: RunAlone) -> None:
    path = fresh("qwen2-tied")
    shard = sorted(path.glob("*.safetensors"))[0]
    added = {tensor.format(layer): torch.ones(2).bfloat16() for layer in range(12)}
    save_file(load_file(shard) | added, shard, metadata={"format": "pt"})
    _, (finding,) = alone("CK110", path)
    assert (finding.tensor, finding.count) == (tensor.format("{0..11}"), 12)


def test_adapters_of_megatron(fresh_megatron: PathOf, alone: RunAlone) -> None:
    path = fresh_megatron("qwen2-tied")

    def change(metadata: Any) -> None:
        key = "decoder.layers.3.self_attention.linear_proj.weight"
        entry = metadata.state_dict_metadata[key]
        index = next(index for index in metadata.storage_data if index.fqn == key)
        name = "decoder.layers.3.self_attention.linear_proj.adapter.linear_in.weight"
        metadata.state_dict_metadata[name] = entry
        metadata.storage_data[type(index)(name, index.offset, 0)] = metadata.storage_data[index]

    models.edit_metadata(path / "release", change)
    _, (finding,) = alone("CK110", path)
    assert (finding.tensor, finding.file) == (
        "decoder.layers.3.self_attention.linear_proj.adapter.linear_in.weight",
        str(path / "release"),
    )


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
def both(fresh: PathOf) -> Path:
    """Shards with an index, and a newer model.safetensors: what `save_pretrained` with larger shards leaves behind."""
    path = fresh("qwen2-tied")
    trained = {name: tensor + 1 if name == NORM else tensor for name, tensor in models.tensors(path).items()}
    save_file(trained, path / SINGLE, metadata={"format": "pt"})
    for file in path.glob("*-of-*.safetensors"):
        os.utime(file, (1_700_000_000, 1_700_000_000))
    os.utime(path / SINGLE, (1_750_000_000, 1_750_000_000))
    return path


@pytest.fixture
def without_index(tmp_path: Path) -> Path:
    models.save("qwen2-tied", tmp_path / "one", shard_size="1GB")
    shutil.copy(tmp_path / "one" / SINGLE, tmp_path / "one" / "old.safetensors")
    return tmp_path / "one"


def test_each_reader_is_said_to_take_its_own_and_nothing_to_be_deleted(both: Path, only: OnlyFinding) -> None:
    finding = only(verify(both))
    assert (finding.code, finding.severity, finding.file) == ("CK104", "error", str(both / SINGLE))
    assert f"last modified: {SINGLE} (2025-06-15 15:06:40 UTC)" in finding.actual
    assert finding.hint == text_with(KEEP)
    os.utime(both / SINGLE, (1_600_000_000, 1_600_000_000))
    actual = only(verify(both)).actual
    assert f"last modified: {SINGLE}" not in actual
    assert "(2023-11-14 22:13:20 UTC)" in actual


def test_transformers_takes_the_single_file(both: Path, releases: PathOf) -> None:
    from transformers import AutoModelForCausalLM

    held = AutoModelForCausalLM.from_pretrained(both, dtype=torch.bfloat16).state_dict()[NORM]
    assert torch.equal(held, models.tensors(releases("qwen2-tied"))[NORM] + 1)


@pytest.mark.sglang
def test_sglang_takes_the_shards_and_without_an_index_every_file(
    both: Path, without_index: Path, only: OnlyFinding
) -> None:
    printed = run_script("sglang", SGLANG, both, without_index)
    chosen = [json.loads(line.removeprefix("files ")) for line in printed.splitlines() if line.startswith("files ")]
    shards = set(json.loads((both / INDEX).read_text())["weight_map"].values())
    assert chosen == [sorted(shards), [SINGLE, "old.safetensors"]]
    finding = only(verify(without_index))
    assert finding.actual.startswith(f"SGLang reads old.safetensors too, transformers {SINGLE} alone; last modified: ")
    assert finding.hint == text_with(KEEP)


def test_shards_under_other_names_are_one_finding_of_each_check(fresh: PathOf) -> None:
    path = fresh("qwen2-tied")
    shards = sorted(path.glob("model-*.safetensors"))
    for shard in shards:
        shard.rename(path / shard.name.replace("model", "weights"))
    first, more = shards[0].name, len(shards) - 1
    other = first.replace("model", "weights")
    found = {one.code: one for one in verify(path).findings}
    assert len(verify(path).findings) == len(found) == 3
    assert found["CK102"].actual == f"{first} and {more} more: missing"
    assert found["CK104"].actual == text_with(f"{other} {more}")
    assert found["CK108"].hint == text_with(f"{other} {first} {more}")


def twice(path: Path, other: str) -> str:
    """Stores the norm in the file of another tensor too; returns the norm's own file."""
    index = json.loads((path / INDEX).read_text())
    home = index["weight_map"][NORM]
    tensors = load_file(path / other) if (path / other).exists() else {}
    if not tensors:
        index["weight_map"]["another"] = other
        (path / INDEX).write_text(json.dumps(index))
    save_file({**tensors, NORM: models.tensors(path)[NORM]}, path / other)
    os.utime(path / home, (1_700_000_000, 1_700_000_000))
    return str(home)


def embedding_file(path: Path) -> str:
    return str(json.loads((path / INDEX).read_text())["weight_map"]["model.embed_tokens.weight"])


@pytest.mark.parametrize("lone", [False, True])
def test_tensor_in_two_shards(lone: bool, fresh: PathOf) -> None:
    """The index names one copy; the other file is only to be moved if nothing else that is needed is in it."""
    path = fresh("qwen2-tied")
    other = "copy.safetensors" if lone else embedding_file(path)
    home = twice(path, other)
    (found,) = (one for one in verify(path).findings if one.tensor == NORM and one.code == "CK104")
    assert set(found.actual.partition("; ")[0].removeprefix("stored in ").split(" and ")) == {home, other}
    assert f"; the index names {home}; last modified: {other} (" in found.actual
    assert found.hint.startswith(f"move {other} elsewhere" if lone else f"write {other} again")
    assert found.hint == text_with(KEEP)


def test_two_saves_in_one_index_are_a_finding_for_each_pair_of_files(fresh: PathOf) -> None:
    path = fresh("qwen2-tied")
    index = json.loads((path / INDEX).read_text())
    first, second, *_ = sorted(set(index["weight_map"].values()))
    for number, file in enumerate((first, second)):
        shutil.copyfile(path / file, path / f"copy-{number}.safetensors")
        index["weight_map"][f"another.{number}"] = f"copy-{number}.safetensors"
    (path / INDEX).write_text(json.dumps(index))
    found = [one for one in verify(path).findings if one.expected == text_with("each tensor one shard")]
    assert {one.names for one in found} == {frozenset(load_file(path / file)) for file in (first, second)}
