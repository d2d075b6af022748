"""compressed-tensors packs the same modules of transformers' own model with the config.json of `lint --fix`."""

import json

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from releases.record import load
from support import published
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from ckptkit.quant.ignore.lint import lint

# Language models cut to a few layers beside their towers as released: the release, layers, Linear layers of the tower.
MODELS = {
    "Qwen3-VL-30B-A3B": ("Qwen/Qwen3-VL-30B-A3B-Instruct", 3, 116),
    "Qwen3.5-35B-A3B": ("Qwen/Qwen3.5-35B-A3B", 4, 110),
    "medgemma-27b": ("google/medgemma-27b-it", 6, 162),
}


def config_of(name):
    """config.json of a release as transformers reads it, with fewer layers."""
    release, layers, _ = MODELS[name]
    content = json.loads(json.dumps(load(release).config))
    text = content["text_config"]
    text |= {"num_hidden_layers": layers} | {key: text[key][:layers] for key in ("layer_types",) if key in text}
    return AutoConfig.for_model(content.pop("model_type"), **content)


def whole(config):
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)


def packed(config, ignore):
    """The modules to which compressed-tensors gives a quantization scheme by this list."""
    model = whole(config)
    apply_quantization_config(model, QuantizationConfig(**published.quantization(ignore)))
    return {name for name, module in model.named_modules() if getattr(module, "quantization_scheme", None) is not None}


def linears_of_vision(config):
    found = (name for name, module in whole(config).named_modules() if isinstance(module, nn.Linear))
    return [name for name in found if not name.startswith("model.language_model.") and name != "lm_head"]


def fixed(path, config, ignore):
    published.write(path, json.loads(config.to_json_string(use_diff=False)), ignore)
    report = lint(path, fix=True)
    return report, json.loads((path / "config.json").read_text())["quantization_config"]["ignore"]


@pytest.mark.parametrize("name", MODELS)
def test_fix_of_a_list_with_every_vision_module_written_out_packs_the_same(tmp_path, name):
    """As llm-compressor saves lists: one entry for every Linear that stays, and the head."""
    config, count = config_of(name), MODELS[name][2]
    vision = linears_of_vision(config)
    assert len(vision) == count
    gates = ["re:.*mlp.gate$", "re:.*mlp.shared_expert_gate$", "re:.*linear_attn.*"]
    ignore = ["lm_head", *vision, *(gates if name != "medgemma-27b" else [])]
    report, written = fixed(tmp_path, config, ignore)
    before = packed(config, ignore)
    assert before
    assert not before & {*vision, "lm_head"}
    assert packed(config, written) == before
    assert {*vision, "lm_head"} <= set(written)
    assert not {one.pattern for one in report.findings if one.kind == "unused"} & {*vision, "lm_head"}


PATTERNS = {
    "Qwen3-VL-30B-A3B": ["re:.*lm_head", "re:visual.*", "re:model.visual.*", "re:.*mlp.gate$"],
    "Qwen3.5-35B-A3B": [
        *("re:.*lm_head", "re:model.visual.*", "re:.*mlp.gate$", "re:.*mlp.shared_expert_gate$"),
        *("re:.*linear_attn.*", "re:.*embed_tokens$"),
    ],
    "medgemma-27b": ["lm_head", r"re:model\.vision_tower.*", r"re:model\.multi_modal_projector.*"],
}


@pytest.mark.parametrize("name", MODELS)
def test_fix_of_a_recipe_packs_the_same(tmp_path, name):
    config, ignore = config_of(name), PATTERNS[name]
    _, written = fixed(tmp_path, config, ignore)
    before = packed(config, ignore)
    assert before
    assert not before & {*linears_of_vision(config), "lm_head"}
    assert packed(config, written) == before


def test_entry_read_differently_is_not_replaced_by_what_leaves_the_vision_tower_out(tmp_path):
    """slime reads it otherwise, so it goes; what it covers in the vision tower goes by name instead."""
    config = config_of("Qwen3-VL-30B-A3B")
    ignore = ["re:.*lm_head", "re:model.visual.*fc.$", "re:model.visual.*qkv$", r"re:.*(mlp\.gate|attn\.proj)$"]
    _, written = fixed(tmp_path, config, ignore)
    assert r"re:.*(mlp\.gate|attn\.proj)$" not in written
    assert "model.visual.blocks.26.attn.proj" in written
    assert packed(config, written) == packed(config, ignore)


def test_names_of_older_versions_of_transformers_stay(tmp_path):
    """transformers up to 4.57, and lists it saved, use `model.vision_tower.vision_model.encoder…` for Gemma."""
    names = [f"model.vision_tower.vision_model.encoder.layers.{layer}.mlp.fc1" for layer in range(27)]
    old = "vision_tower.vision_model.encoder.layers.0.mlp.fc2"
    report, written = fixed(tmp_path, config_of("medgemma-27b"), ["lm_head", *names, old])
    assert {*names, old} <= set(written)
    assert report.patterns[names[3]]["transformers"] == (f"{names[3]}.weight",)
    assert report.patterns[names[3]]["slime"] == ()


@pytest.mark.parametrize("known", [True, False])
def test_entry_is_removed_only_where_all_modules_are_known(tmp_path, known):
    config = {**published.KIMI, **({"num_nextn_predict_layers": 1} if not known else {})}
    report = lint(published.write(tmp_path, config, [*published.KIMI_LIST, "re:.*enorm_proj.*"]))
    assert ("re:.*enorm_proj.*" in report.portable) is not known
    (said,) = [finding for finding in report.findings if finding.pattern == "re:.*enorm_proj.*"]
    assert (said.kind, said.severity) == (("unused", "warning") if known else ("not judged", "note"))


def test_vision_entries_of_a_model_without_classes_stay(tmp_path):
    """Kimi K2.5's tower is known to nobody but its own code."""
    entries = ["re:vision_tower.*", "re:mm_projector.*"]
    config = {"model_type": "kimi_k25", "text_config": {**published.KIMI, "model_type": "kimi_k2"}, "vision_config": {}}
    report = lint(published.write(tmp_path, config, [*published.KIMI_LIST, *entries]))
    assert {*published.KIMI_LIST, *entries} <= set(report.portable)
    assert {finding.pattern for finding in report.findings if finding.kind == "not judged"} == set(entries)
