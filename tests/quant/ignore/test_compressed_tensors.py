"""ckptkit's reading of compressed-tensors' lists against compressed-tensors itself, over many lists.

At run time it is not asked: importing it takes seconds, which `lint` of a header must not.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.utils.match import match_name
from support.nightly import daily
from support.published import (
    GLM,
    GLM_LIST,
    GLM_RULES,
    KIMI,
    KIMI_LIST,
    LAYERS,
    MINIMAX,
    MINIMAX_LIST,
    PUBLISHED,
    QWEN,
    QWEN_LIST,
    quantization,
    restored,
)
from torch import nn

from ckptkit.quant.formats.groups import groups_of, targets_of
from ckptkit.quant.ignore.names import matrices_named, names_in_vllm
from ckptkit.quant.ignore.reading import read_all
from ckptkit.quant.ignore.tree import class_tree

ENTRIES = tomllib.loads(Path(__file__).with_name("entries.toml").read_text())
MODELS = {
    "qwen3": {**QWEN, "model_type": "qwen3"},
    "qwen3_moe": QWEN,
    "glm4_moe": GLM,
    "kimi_k2": KIMI,
    "minimax_m2": MINIMAX,
}
CLASSES = ("Linear", "Module", "Embedding", "linear")
KEYS = ("ignore", "exclude_modules", "exclude", "modules_to_not_convert", "ignored_layers")


def published(content):
    for key, value in content.items() if isinstance(content, Mapping) else ():
        if key in KEYS and value:
            yield tuple(restored(value))
        yield from published(value)


@cache
def lists():
    """Every entry of entries.toml by itself, all of a kind at once, and published lists."""
    found = {list_: None for release in PUBLISHED.values() for list_ in published(release)}
    found |= {tuple(entries): None for entries in (KIMI_LIST, QWEN_LIST, GLM_LIST, GLM_RULES, MINIMAX_LIST)}
    for entries in ENTRIES.values():
        found |= dict.fromkeys([tuple(entries), *((entry,) for entry in entries)])
    return list(found)


def matrices_of(config):
    tree = class_tree(config)
    every = [*tree.others, *sorted(tree.linears - tree.experts), *sorted(tree.experts)[:6]]
    return matrices_named([f"{module}.weight" for module in every], tree, config)


def built(matrices):
    """A model on the meta device with these modules, each of the class that it has in transformers."""
    root = nn.Module()
    for matrix in matrices:
        kind = {"Linear": nn.Linear, "Embedding": nn.Embedding}.get(matrix.torch_class or "")
        parent = root
        *path, name = matrix.module.split(".")
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(name, kind(64, 64, device="meta") if kind else nn.Module())
    return root


def content_of(ignore, *targets):
    """A quantization_config with a group for each of `targets`, of 4 and of 8 bits in turn."""
    content = quantization(ignore, groups=len(targets))
    groups = {
        name: {**group, "targets": list(several), "weights": {**group["weights"], "num_bits": 4 + 4 * (index % 2)}}
        for index, ((name, group), several) in enumerate(zip(content["config_groups"].items(), targets, strict=True))
    }
    return {**content, "config_groups": groups}


def contents():
    """Every list as `ignore`, as targets, and as targets that overlap those of another group."""
    for one in lists():
        yield content_of(one, ("Linear",))
        yield content_of(("lm_head",), one)
        yield content_of((), ("re:.*proj",), one)
        yield content_of((), one, CLASSES)
    for one, other in pairwise(lists()):
        yield content_of((), one, other)
    for name in CLASSES:
        yield from (content_of((name,), ("Linear",)), content_of((), (name,)))


def test_there_are_many_lists_and_long_ones():
    assert len(lists()) > 130
    assert any(len(one) > 100 for one in lists())


def taken(matrices, config, content):
    """The target by which ckptkit has each module quantized for compressed-tensors."""
    targets = targets_of(groups_of({"quantization_config": content}))
    reading = read_all((), matrices, content["ignore"], config, targets)["compressed-tensors"]
    rows = zip(matrices, reading.answers, reading.targets, strict=True)
    return {matrix.module: target for matrix, answer, target in rows if target and answer == "packs"}


@pytest.mark.parametrize("name", daily(MODELS, ("qwen3_moe", "kimi_k2")))
def test_lists_are_read_as_compressed_tensors_applies_them(name):
    """Its `apply_quantization_config` gives each module the bits of the group that ckptkit has it in."""
    matrices = [matrix for matrix in matrices_of(MODELS[name]) if f".layers.{LAYERS - 1}." not in matrix.module]
    for content in contents():
        model = built(matrices)
        config = QuantizationConfig.model_validate(content)
        apply_quantization_config(model, config, run_compressed=True, show_progress=False)
        applied = {
            name: module.quantization_scheme.weights.num_bits
            for name, module in model.named_modules()
            if getattr(module, "quantization_scheme", None)
        }
        assert applied == {name: 4 + 4 * one.group for name, one in taken(matrices, MODELS[name], content).items()}, (
            content
        )


@pytest.mark.parametrize("config", [QWEN, KIMI], ids=["Qwen3-MoE", "Kimi-K2"])
def test_parts_of_fused_layers_are_looked_up_as_in_compressed_tensors(config):
    several = matrices_of(config)
    fused = {
        matrix.vllm: names_in_vllm(matrix)
        for matrix in several
        if matrix.vllm and ".experts" not in matrix.vllm and len(names_in_vllm(matrix)) > 1
    }
    assert fused
    mapping = {layer.rpartition(".")[2]: [part.rpartition(".")[2] for part in parts] for layer, parts in fused.items()}
    for ignore in lists():
        covers = read_all(["vLLM 0.26"], several, ignore, config)["vLLM 0.26"].covers
        for layer, parts in fused.items():
            own = {entry: any(part in covers[entry] for part in parts) for entry in ignore}
            assert own == {entry: match_name(layer, entry, mapping) for entry in ignore}, layer
