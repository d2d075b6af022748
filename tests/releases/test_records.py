"""The records and what is written from them, held against transformers' classes and the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion

from releases.header_only import write
from releases.record import Release, load, models, unfolded

# One of each kind that transformers saves whole, under the names of the release: no draft layer, no quantization.
BY_CLASS = (
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2-57B-A14B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-30B-A3B-Instruct-2507",
    "Qwen/Qwen3-VL-2B-Instruct",
    "google/gemma-3-1b-it",
    "meta-llama/Llama-3.2-1B-Instruct",
    "mistralai/Mistral-Nemo-Instruct-2407",
    "mistralai/Mixtral-8x7B-v0.1",
)


@pytest.mark.parametrize("model", BY_CLASS)
def test_names_and_shapes_are_those_of_transformers_class(model: str) -> None:
    release = load(model)
    stored = {tensor.name: tensor.shape for tensor in release.tensors_in_order}
    assert stored == saved_by_transformers(release)


def saved_by_transformers(release: Release) -> dict[str, tuple[int, ...]]:
    """What `save_pretrained` would write of the model, without its weights: tied tensors once, experts one by one."""
    fields = {key: value for key, value in release.config.items() if key != "model_type"}
    config: Any = AutoConfig.for_model(release.config["model_type"], **fields)
    auto: Any = AutoModelForImageTextToText if "vision_config" in fields else AutoModelForCausalLM
    with torch.device("meta"):
        built = auto.from_config(config, attn_implementation="eager")
    tensors = dict(built.state_dict())
    for tied in (built._tied_weights_keys or {}) if config.tie_word_embeddings else ():
        del tensors[tied]
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(built, tensors).items()}


@pytest.mark.parametrize("model", ["openai/gpt-oss-20b", "Qwen/Qwen3-0.6B", "RedHatAI/Qwen3-8B-quantized.w4a16"])
def test_written_release_is_what_safetensors_reads(model: str, tmp_path: Path) -> None:
    release = load(model)
    path = write(release, tmp_path / "release")
    read = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            read |= {name: (opened.get_slice(name).get_dtype(), tuple(opened.get_slice(name).get_shape())) for name in list(opened.keys())}
    assert read == {tensor.name: (tensor.dtype, tensor.shape) for tensor in release.tensors_in_order}
    assert sum(file.stat().st_size for file in path.glob("*.safetensors")) > release.nbytes
    assert sum(file.stat().st_blocks * 512 for file in path.iterdir()) < 1_000_000


def test_first_shard_of_gpt_oss_is_number_0(tmp_path: Path) -> None:
    path = write(load("openai/gpt-oss-20b"), tmp_path / "release")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{number}-of-00002.safetensors" for number in (0, 1, 2)]


def test_folded_names_are_written_out() -> None:
    assert list(unfolded("layers.{0,2..4,7..15/4}.{a,b}")) == [f"layers.{layer}.{name}" for layer in (0, 2, 3, 4, 7, 11, 15) for name in "ab"]
    assert list(unfolded("model.norm.weight")) == ["model.norm.weight"]


def test_every_record_says_where_it_comes_from() -> None:
    for model in models():
        release = load(model)
        assert release.model == model
        assert release.known in ("index", "numbers", "parameters", "class")
        assert "config" in release.sources
        assert (release.known == "index") == ("index" in release.sources)
        assert (release.parameters is not None) == ("parameters" in release.sources)
        assert ("why" in release.findings) == bool(release.findings)
