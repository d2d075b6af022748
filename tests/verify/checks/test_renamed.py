"""Names that a wrapper changed: the change in one finding, whatever else is wrong in findings of its own."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mutations.edits import names, replace
from mutations.int4 import packed
from safetensors.torch import save_file
from support import models
from support.fixture_types import OnlyFinding, PathOf
from support.messages import text_with
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from ckptkit.verify.checks.headers.renamed import renamed
from ckptkit.verify.core.report import Finding, Report
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.run import verify

Change = Callable[[str], str | None]
Renamed = Callable[..., Path]


@pytest.fixture
def saved(releases: PathOf, tmp_path: Path) -> Renamed:
    """`saved(change)`: a release in one file, with the names that `change` gives; None leaves a tensor out."""

    def save(change: Change, name: str = "qwen2-untied") -> Path:
        release, path = releases(name), tmp_path / f"renamed {name}"
        shutil.copytree(release, path, ignore=shutil.ignore_patterns("*.safetensors*"))
        content: dict[str, Tensor] = {}
        for stored, tensor in models.tensors(release).items():
            if (other := change(stored)) is not None:
                content[other] = tensor
        save_file(content, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return save


# What is put before all names, what is said of it, and words of the next move.
FURTHER = {
    "model.": ("an extra prefix `model.`", ""),
    "language_model.language_model.": ("an extra prefix `language_model.language_model.`", ""),
    "base_model.model.": ("an extra prefix `base_model.model.`", "merge_and_unload()"),
    "module.": (text_with("module names"), "model.module"),
    "_orig_mod.": (text_with("_orig_mod"), "model._orig_mod"),
    "_fsdp_wrapped_module.": (text_with("_fsdp_wrapped_module"), "full state dict"),
    "_checkpoint_wrapped_module.": (text_with("_checkpoint_wrapped_module"), ""),
}


@pytest.mark.parametrize("prefix", FURTHER)
def test_prefix_of_all_names_is_one_finding(prefix: str, saved: Renamed, only: OnlyFinding) -> None:
    actual, hint = FURTHER[prefix]
    path = saved(lambda name: prefix + name)
    for report in (verify(path), preflight(hf_checkpoint=path)):
        finding = only(report)
        assert (finding.code, finding.actual, finding.count) == ("CK104", actual, 147)
        assert finding.expected.startswith("names such as ")
        assert f"{prefix}lm_head.weight" in str(finding.tensor)
        assert hint in finding.hint
        assert "num_hidden_layers" not in finding.hint


def test_names_of_the_inner_model_are_one_finding(saved: Renamed, only: OnlyFinding) -> None:
    finding = only(verify(saved(lambda name: name.removeprefix("model."), "qwen2-tied")))
    assert (finding.code, finding.actual) == ("CK104", "the prefix `model.` is missing")
    assert "ForCausalLM" in finding.hint


def test_wrapper_inside_some_names_is_one_finding(saved: Renamed, only: OnlyFinding) -> None:
    finding = only(verify(saved(lambda name: name.replace(".0.mlp.", ".0.mlp._fsdp_wrapped_module."))))
    assert (finding.code, finding.count) == ("CK104", 3)
    assert finding.actual == text_with("_fsdp_wrapped_module")


def test_what_is_lost_beside_it_is_found_too(saved: Renamed) -> None:
    lost = "model.layers.3.mlp.up_proj.weight"
    found = verify(saved(lambda name: None if name == lost else f"module.{name}")).findings
    assert [(one.code, one.tensor if one.count == 1 else one.count) for one in found] == [
        ("CK104", 146),
        ("CK104", lost),
    ]


def test_index_of_other_names_alone_is_enough(releases: PathOf, tmp_path: Path) -> None:
    """Before the shards are downloaded."""
    path, index = tmp_path / "listed", "model.safetensors.index.json"
    shutil.copytree(releases("qwen2-untied"), path, ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((path / index).read_text())
    content["weight_map"] = {f"module.{name}": file for name, file in content["weight_map"].items()}
    (path / index).write_text(json.dumps(content))
    found = [one for one in verify(path).findings if one.code == "CK104"]
    assert [(one.actual, one.count) for one in found] == [(text_with("module names"), 147)]


def test_parts_of_a_packed_weight_stand_for_it() -> None:
    promised = ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    parts = ("weight_packed", "weight_scale", "weight_shape")
    stored = [f"module.model.layers.0.mlp.up_proj.{part}" for part in parts]
    found = renamed([*stored, "module.model.norm.weight"], promised)
    assert found is not None
    assert set(promised) <= found.promised
    assert len(found.stored) == 4


@pytest.mark.parametrize(
    "names",
    [
        ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"],
        ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"],
        ["visual.blocks.0.mlp.up_proj.weight", "model.norm.weight"],
        [],
    ],
)
def test_other_names_are_not_called_renamed(names: list[str]) -> None:
    assert renamed(names, ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]) is None


def test_a_part_that_is_repeated_inside_the_names_is_one_finding(saved: Renamed, only: OnlyFinding) -> None:
    finding = only(verify(saved(lambda name: name.replace("model.layers.", "model.layers.layers."))))
    assert (finding.code, finding.actual) == ("CK104", text_with("layers repeated"))
    assert "num_hidden_layers" not in finding.hint


# CK104's next move follows from what is wrong: the key of config.json that disagrees with the names, or none.


_INDEX = "model.safetensors.index.json"
KEYS = (
    *("num_hidden_layers", "num_nextn_predict_layers", "num_local_experts", "n_routed_experts", "tie_word_embeddings"),
    *("architectures", "first_k_dense_replace", "attention_bias", "index"),
)


def add(path: Path, *names: str) -> None:
    replace(path, {name: torch.ones(4, 4, dtype=torch.bfloat16) for name in names})


def lose(path: Path, wanted: Callable[[str], Any]) -> None:
    """Takes tensors out of shards and index."""
    index = json.loads((path / _INDEX).read_text())
    stored = models.tensors(path)
    for file in set(index["weight_map"].values()):
        kept = {name: stored[name] for name, home in index["weight_map"].items() if home == file and not wanted(name)}
        if kept:
            save_file(kept, path / file, metadata={"format": "pt"})
        else:
            (path / file).unlink()
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if not wanted(name)}
    (path / _INDEX).write_text(json.dumps(index))


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
    index = json.loads((path / _INDEX).read_text())
    index["weight_map"]["v_head.weight"] = next(iter(index["weight_map"].values()))
    (path / _INDEX).write_text(json.dumps(index))
    (found,) = of_names(path)
    assert (found.tensor, named(found.hint)) == ("v_head.weight", {"index"})


# Models that ckptkit does not know: layers that differ on purpose are not taken for layers that lost something.


LAYERS, EACH = 12, 6  # every sixth layer has full attention


def save_gemma4(path: Path, *, keys_as_values: bool, sharing: int) -> Path:
    """A small Gemma 4 as transformers saves it: keys as values in full attention, layers without their own."""
    config = Gemma4TextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,
        layer_types=["full_attention" if (layer + 1) % EACH == 0 else "sliding_attention" for layer in range(LAYERS)],
        attention_k_eq_v=keys_as_values,
        num_kv_shared_layers=sharing,
        hidden_size_per_layer_input=0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path, max_shard_size="100KB")
    stated = json.loads((path / "config.json").read_text()) | {"model_type": "gemma_later"}  # Gemma 4 itself is known
    (path / "config.json").write_text(json.dumps(stated))
    return path


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the 31B: keys for values in the layers of full attention."""
    return save_gemma4(tmp_path_factory.mktemp("gemma4") / "release", keys_as_values=True, sharing=0)


def in_int4(path: Path, spared: str = "\0") -> None:
    """Packs every projection, but those of modules that begin so: only the names count here."""
    packed([name.removesuffix(".weight") for name in names(path, "_proj.weight") if not name.startswith(spared)])(
        path, ""
    )


def missing(report: Report) -> list[str | None]:
    return [finding.tensor for finding in report.findings if finding.code == "CK104"]


def test_keys_that_are_used_as_values_are_no_lost_values(gemma4: Path, copy_of: Callable[[Path], Path]) -> None:
    full = [f"model.layers.{layer}.self_attn.v_proj.weight" for layer in range(EACH - 1, LAYERS, EACH)]
    assert models.tensors(gemma4).keys().isdisjoint(full)
    assert missing(verify(gemma4)) == []
    path = copy_of(gemma4)
    in_int4(path)
    assert missing(verify(path)) == []


def test_one_layer_that_is_left_unquantized_lost_nothing(gemma4: Path, copy_of: Callable[[Path], Path]) -> None:
    path = copy_of(gemma4)
    in_int4(path, "model.layers.3.")
    assert missing(verify(path)) == []


def test_layers_that_share_the_keys_of_an_earlier_one_lost_nothing(tmp_path: Path) -> None:
    """As the E2B that transformers saves: no k_proj, v_proj and k_norm in the last layers."""
    path = save_gemma4(tmp_path / "release", keys_as_values=False, sharing=4)
    stored = models.tensors(path)
    assert [f"model.layers.{layer}.self_attn.k_proj.weight" in stored for layer in (7, 8)] == [True, False]
    assert missing(verify(path)) == []


def test_values_that_one_layer_lost_are_named(gemma4: Path, copy_of: Callable[[Path], Path]) -> None:
    path = copy_of(gemma4)
    in_int4(path)
    replace(path, {}, [f"model.layers.7.mlp.up_proj.weight_{part}" for part in ("packed", "scale", "shape")])
    assert missing(verify(path)) == ["layers.7.mlp.up_proj.weight"]
