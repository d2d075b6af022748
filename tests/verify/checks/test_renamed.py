"""Names that a wrapper changed: the change in one finding, whatever else is wrong in findings of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file
from support import models
from support.fixture_types import OnlyFinding, PathOf
from torch import Tensor

from ckptkit.app.api import quantize
from quant.formats.scheme import QuantScheme
from verify.checks.headers.renamed import renamed
from verify.launch.preflight import preflight
from verify.run import verify

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


# What is put before all names, and what is said of it.
FURTHER = {
    "model.": "an extra prefix `model.`",
    "language_model.language_model.": "an extra prefix `language_model.language_model.`",
    "base_model.model.": "an extra prefix `base_model.model.`",
    "module.": "`module.` is part of their names",
    "_orig_mod.": "`_orig_mod.` is part of their names",
    "_fsdp_wrapped_module.": "`_fsdp_wrapped_module.` is part of their names",
    "_checkpoint_wrapped_module.": "`_checkpoint_wrapped_module.` is part of their names",
}
HINTS = {
    "base_model.model.": "merge_and_unload()",
    "module.": "model.module",
    "_orig_mod.": "model._orig_mod",
    "_fsdp_wrapped_module.": "full state dict",
}


@pytest.mark.parametrize("prefix", FURTHER)
def test_prefix_of_all_names_is_one_finding(prefix: str, saved: Renamed, only: OnlyFinding) -> None:
    path = saved(lambda name: prefix + name)
    for report in (verify(path), preflight(hf_checkpoint=path)):
        finding = only(report)
        assert (finding.code, finding.actual, finding.count) == ("CK104", FURTHER[prefix], 147)
        assert finding.expected.startswith("names such as ")
        assert f"{prefix}lm_head.weight" in str(finding.tensor)
        assert HINTS.get(prefix, "") in finding.hint
        assert "num_hidden_layers" not in finding.hint


def test_prefix_of_a_mixture_of_experts_is_one_finding(saved: Renamed, only: OnlyFinding) -> None:
    for name in ("qwen3_moe", "glm4_moe"):  # the latter with multi-token prediction
        finding = only(verify(saved(lambda stored: f"model.{stored}", name)))
        assert (finding.code, finding.actual) == ("CK104", "an extra prefix `model.`")


def test_names_of_the_inner_model_are_one_finding(saved: Renamed, only: OnlyFinding) -> None:
    finding = only(verify(saved(lambda name: name.removeprefix("model."), "qwen2-tied")))
    assert (finding.code, finding.actual) == ("CK104", "the prefix `model.` is missing")
    assert "ForCausalLM" in finding.hint


def test_wrapper_inside_some_names_is_one_finding(saved: Renamed, only: OnlyFinding) -> None:
    finding = only(verify(saved(lambda name: name.replace(".0.mlp.", ".0.mlp._fsdp_wrapped_module."))))
    assert (finding.code, finding.count) == ("CK104", 3)
    assert finding.actual == "`_fsdp_wrapped_module.` is part of their names"


def test_what_is_lost_beside_it_is_found_too(saved: Renamed) -> None:
    lost = "model.layers.3.mlp.up_proj.weight"
    found = verify(saved(lambda name: None if name == lost else f"module.{name}")).findings
    assert [(one.code, one.tensor if one.count == 1 else one.count) for one in found] == [
        ("CK104", 146),
        ("CK104", lost),
    ]


def test_adapter_behind_the_prefix_of_peft_is_still_an_adapter(saved: Renamed) -> None:
    path = saved(lambda name: f"base_model.model.{name.replace('q_proj.weight', 'q_proj.lora_A.weight')}")
    found = [one for one in verify(path).findings if one.code == "CK110"]
    assert [(one.tensor, one.count) for one in found] == [
        ("base_model.model.model.layers.{0..11}.self_attn.q_proj.lora_A.weight", 12)
    ]


def test_index_of_other_names_alone_is_enough(releases: PathOf, tmp_path: Path) -> None:
    """Before the shards are downloaded."""
    path, index = tmp_path / "listed", "model.safetensors.index.json"
    shutil.copytree(releases("qwen2-untied"), path, ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((path / index).read_text())
    content["weight_map"] = {f"module.{name}": file for name, file in content["weight_map"].items()}
    (path / index).write_text(json.dumps(content))
    found = [one for one in verify(path).findings if one.code == "CK104"]
    assert [(one.actual, one.count) for one in found] == [("`module.` is part of their names", 147)]


def test_prefix_of_an_int4_checkpoint_is_one_finding(releases: PathOf, tmp_path: Path, only: OnlyFinding) -> None:
    path = tmp_path / "int4"
    quantize(releases("qwen3_moe"), path, QuantScheme(32, "qmax7"))
    content = {f"module.{name}": tensor for name, tensor in models.tensors(path).items()}
    for file in path.glob("*.safetensors*"):
        file.unlink()
    save_file(content, path / "model.safetensors", metadata={"format": "pt"})
    finding = only(verify(path))
    assert (finding.code, finding.actual) == ("CK104", "`module.` is part of their names")


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
    assert (finding.code, finding.actual) == ("CK104", "`layers.` is repeated inside their names")
    assert "num_hidden_layers" not in finding.hint
