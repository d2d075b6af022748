"""CK104's next move follows from what is wrong: the key of config.json that disagrees with the names, or none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import models
from support.fixture_types import PathOf

from verify.report import Finding
from verify.run import verify

INDEX = "model.safetensors.index.json"
KEYS = (
    *("num_hidden_layers", "num_nextn_predict_layers", "num_local_experts", "n_routed_experts", "tie_word_embeddings"),
    *("architectures", "first_k_dense_replace", "attention_bias", "index"),
)


def add(path: Path, *names: str) -> None:
    """Stores further tensors, in a shard of their own."""
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(names, "more.safetensors")
    (path / INDEX).write_text(json.dumps(index))
    save_file({name: torch.ones(4, 4, dtype=torch.bfloat16) for name in names}, path / "more.safetensors")


def lose(path: Path, wanted: Callable[[str], Any]) -> None:
    """Takes tensors out of shards and index."""
    index = json.loads((path / INDEX).read_text())
    stored = models.tensors(path)
    for file in set(index["weight_map"].values()):
        kept = {name: stored[name] for name, home in index["weight_map"].items() if home == file and not wanted(name)}
        if kept:
            save_file(kept, path / file, metadata={"format": "pt"})
        else:
            (path / file).unlink()
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if not wanted(name)}
    (path / INDEX).write_text(json.dumps(index))


def of_names(path: Path) -> list[Finding]:
    return [one for one in verify(path).findings if one.code == "CK104"]


def named(hint: str) -> set[str]:
    """The keys of config.json that a hint names."""
    return {key for key in KEYS if re.search(rf"\b{key}\b", hint)}


@pytest.mark.parametrize(
    ("release", "names", "keys"),
    [
        ("qwen2-tied", ["v_head.summary.weight"], {"architectures"}),  # TRL
        ("qwen2-tied", ["score.weight"], {"architectures"}),
        ("qwen3_moe", ["classifier.weight"], {"architectures"}),
        ("glm4_moe", ["v_head.summary.weight", "v_head.summary.bias"], {"architectures"}),
        ("qwen2-tied", ["visual.blocks.0.attn.qkv.weight"], set()),
        ("qwen2-tied", ["model.layers.12.mlp.up_proj.weight"], {"num_hidden_layers"}),
        ("qwen2-tied", ["model.layers.40.mlp.up_proj.weight"], {"num_hidden_layers"}),
        ("glm4_moe", ["model.layers.12.eh_proj.weight"], {"num_nextn_predict_layers"}),
        ("qwen3_moe", ["mtp.layers.0.self_attn.q_proj.weight"], {"num_nextn_predict_layers"}),
        ("qwen3_moe", ["model.layers.3.mlp.experts.12.up_proj.weight"], {"num_local_experts"}),
        ("glm4_moe", ["model.layers.1.mlp.gate.weight"], {"first_k_dense_replace"}),
        ("qwen3_moe", ["model.layers.1.self_attn.q_proj.bias"], {"attention_bias"}),
        ("qwen2-tied", ["model.layers.1.self_attn.q_b_proj.weight"], {"architectures"}),
        ("qwen2-tied", ["something.else"], {"architectures"}),
    ],
)
def test_tensor_that_config_does_not_promise(release: str, names: list[str], keys: set[str], fresh: PathOf) -> None:
    path = fresh(release)
    add(path, *names)
    found = [one for one in of_names(path) if one.names <= set(names)]
    assert set().union(*(one.names for one in found)) == set(names)
    assert {frozenset(named(one.hint)) for one in found} == {frozenset(keys)}, [one.hint for one in found]


@pytest.mark.parametrize(
    ("release", "lost", "keys"),
    [
        ("qwen2-untied", r"model\.layers\.(10|11)\.", {"num_hidden_layers"}),
        ("qwen2-untied", r"model\.layers\.5\.", set()),
        ("qwen2-untied", r"model\.layers\.11\.mlp\.up_proj", set()),
        ("qwen2-untied", r"lm_head", {"tie_word_embeddings"}),
        ("qwen3_moe", r".*\.experts\.(10|11)\.", {"num_local_experts"}),
        ("qwen3_moe", r".*layers\.3\.mlp\.experts\.11\.", set()),
        ("qwen2-untied", r"model\.norm", set()),
    ],
)
def test_tensor_that_is_missing(release: str, lost: str, keys: set[str], fresh: PathOf) -> None:
    path = fresh(release)
    lose(path, lambda name: re.match(lost, name))
    found = of_names(path)
    assert found
    assert {frozenset(named(one.hint)) for one in found} == {frozenset(keys)}, [one.hint for one in found]


@pytest.mark.parametrize("head", ["score.weight", "v_head.weight", "regression_head.weight"])
def test_output_layer_that_another_head_replaces_names_architectures(head: str, fresh: PathOf) -> None:
    path = fresh("qwen2-untied")
    lose(path, lambda name: name == "lm_head.weight")
    add(path, head)
    found = {one.tensor: one.hint for one in of_names(path)}
    assert found.keys() == {"lm_head.weight", head}
    assert {frozenset(named(hint)) for hint in found.values()} == {frozenset({"architectures"})}
    assert head in found["lm_head.weight"]


def test_name_that_only_the_index_has(fresh: PathOf) -> None:
    path = fresh("qwen2-tied")
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["v_head.weight"] = next(iter(index["weight_map"].values()))
    (path / INDEX).write_text(json.dumps(index))
    (found,) = of_names(path)
    assert (found.tensor, named(found.hint)) == ("v_head.weight", {"index"})
