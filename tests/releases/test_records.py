"""The records and what is written from them, held against transformers' classes and the safetensors library."""

from __future__ import annotations

import re

import pytest

from ckptkit.core.specs import fold
from releases.fold import saved_by_transformers
from releases.record import load, models, unfolded

# Kinds that transformers saves whole and under the names of the release: no draft layer, no renamed vision tower.
SAVED_WHOLE = {
    "gemma3_text",
    "glm4",
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_vl",
    "seed_oss",
}
BY_CLASS = [
    model
    for model in models()
    if (config := load(model).config)["model_type"] in SAVED_WHOLE and "quantization_config" not in config
]


@pytest.mark.parametrize("model", BY_CLASS)
def test_names_and_shapes_are_those_of_transformers_class(model: str) -> None:
    """But for the output layer, which some tied releases ship all the same."""
    release = load(model)
    stored = {tensor.name: tensor.shape for tensor in release.tensors_in_order}
    saved = saved_by_transformers(release.config)
    assert saved.items() <= stored.items()
    assert stored.keys() - saved.keys() <= ({"lm_head.weight"} if release.config.get("tie_word_embeddings") else set())


def test_folding_names_loses_none() -> None:
    for model in ("Qwen/Qwen3.5-27B", "moonshotai/Moonlight-16B-A3B-Instruct", "openai/gpt-oss-20b"):
        names = [tensor.name for tensor in load(model).tensors_in_order]
        assert sorted(name for pattern in fold(names) for name in unfolded(pattern)) == names


def test_every_record_says_where_it_comes_from() -> None:
    for model in models():
        release = load(model)
        assert release.model == model
        assert release.known in ("index", "numbers", "parameters", "class")
        assert "config" in release.sources
        assert (release.known == "index") == ("index" in release.sources)
        assert (release.parameters is not None) == ("parameters" in release.sources)
        assert ("why" in release.findings) == bool(release.findings)


@pytest.mark.parametrize("model", models())
def test_a_record_is_a_file_and_not_what_transformers_made_of_it(model: str) -> None:
    """Reading a config, transformers 5 adds keys to its rotary settings and renames the kind of a vision tower."""
    config = load(model).config
    rope = config.get("text_config", config).get("rope_scaling") or {}
    assert "rope_theta" not in rope
    assert not {"type", "rope_type"} <= rope.keys()
    assert not re.fullmatch("qwen3.*_vision", str(config.get("vision_config", {}).get("model_type")))
