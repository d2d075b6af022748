"""CK108 and CK110: files that were mixed, lost or renamed, and adapters that were never merged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import models
from support.fixture_types import PathOf, RunAlone

from verify.run import verify

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


def test_a_directory_with_config_alone_is_said_to_have_no_weights(releases: PathOf, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((releases("qwen3_moe") / name).read_bytes())
    report = verify(tmp_path)
    (found,) = [one for one in report.findings if one.severity == "error"]
    assert (found.code, found.expected) == ("CK103", "model.safetensors.index.json, or a single model.safetensors")
    assert found.actual == "no weights: only config.json, generation_config.json"
    skipped = {one.code: one.reason for one in report.checks if one.code in ("CK102", "CK104", "CK105", "CK107")}
    assert set(skipped.values()) == {"not run because there are no weights (CK103)"}
    assert "nothing was compared" not in str(report.findings)
