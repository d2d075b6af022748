"""The records and what is written from them, held against transformers' classes and the safetensors library."""

import re

import pytest
from support.nightly import daily

from ckptkit.converters.registry import FAMILIES
from ckptkit.core.specs import fold
from releases.fold import saved_by_transformers
from releases.record import load, models, one_of_each_type, unfolded

# Kinds that transformers saves under other names than the release, or without some of its tensors, draft layers apart.
SAVED_OTHERWISE = {"deepseek_v3", "gemma3", "kimi_k25", "nemotron_h", "qwen3_vl_moe"}


def is_saved_whole(config):
    family = FAMILIES.get(config["model_type"])
    if family is None or family.release is None or config["model_type"] in SAVED_OTHERWISE:
        return False
    return "quantization_config" not in config and not family.release.drafts(
        family.release.text(config), family.release.root
    )


BY_CLASS = [model for model in models() if is_saved_whole(load(model).config)]


@pytest.mark.parametrize("model", daily(BY_CLASS, one_of_each_type(BY_CLASS)))
def test_names_and_shapes_are_those_of_transformers_class(model):
    """But for the output layer, which some tied releases ship all the same."""
    release = load(model)
    stored = {tensor.name: tensor.shape for tensor in release.tensors_in_order}
    saved = saved_by_transformers(release.config)
    why = f"if transformers saves it so, add {release.config['model_type']!r} to SAVED_OTHERWISE"
    assert saved.items() <= stored.items(), why
    assert stored.keys() - saved.keys() <= ({"lm_head.weight"} if release.config.get("tie_word_embeddings") else set())


def test_folding_names_loses_none():
    for model in ("Qwen/Qwen3.5-27B", "moonshotai/Moonlight-16B-A3B-Instruct", "openai/gpt-oss-20b"):
        names = [tensor.name for tensor in load(model).tensors_in_order]
        assert sorted(name for pattern in fold(names) for name in unfolded(pattern)) == names


def test_every_record_says_where_it_comes_from_and_is_not_what_transformers_made_of_it():
    """Reading a config, transformers 5 adds keys to its rotary settings and renames the kind of a vision tower."""
    for model in models():
        release = load(model)
        assert release.model == model
        assert release.known in ("index", "numbers", "parameters", "class")
        assert "config" in release.sources
        assert (release.known == "index") == ("index" in release.sources)
        assert (release.parameters is not None) == ("parameters" in release.sources)
        assert ("why" in release.findings) == bool(release.findings)
        rope = release.config.get("text_config", release.config).get("rope_scaling") or {}
        assert "rope_theta" not in rope
        assert not {"type", "rope_type"} <= rope.keys()
        assert not re.fullmatch("qwen3.*_vision", str(release.config.get("vision_config", {}).get("model_type")))
