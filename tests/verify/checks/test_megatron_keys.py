"""CK114 to CK117, CK111 and CK107: a torch_dist checkpoint wrong in one way; what real Megatron writes is silent."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import models
from support.fixture_types import PathOf, RunAlone
from support.megatron_saves import SAVES

from verify.run import verify

CODES = ["CK114", "CK115", "CK116", "CK117"]
LABELS = [label for label, (_, how) in SAVES.items() if "legacy" not in how and "fsdp2" not in how]


def edit_common(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    common = torch.load(path / "release" / "common.pt", weights_only=False)
    change(common)
    torch.save(common, path / "release" / "common.pt")


def edit_args(path: Path, **changes: Any) -> None:
    edit_common(path, lambda common: common.update(args=Namespace(**(vars(common["args"]) | changes))))


@pytest.mark.parametrize("label", LABELS)
def test_what_megatron_writes_is_silent(label: str, saved: Path, passes: Callable[..., None]) -> None:
    for code in CODES:
        passes(code, saved / label)


def test_an_hf_directory_has_no_keys(releases: PathOf, alone: RunAlone) -> None:
    assert [alone(code, releases("qwen2-tied")) for code in CODES] == [(None, [])] * len(CODES)


# CK114


def test_a_layer_that_the_save_lost(fresh_megatron: PathOf, alone: RunAlone) -> None:
    """Without the HF config, which is the case for a run's own saves, only the arguments tell."""
    path = fresh_megatron("qwen2-tied")

    def change(metadata: Any) -> None:
        for key in [key for key in metadata.state_dict_metadata if key.startswith("decoder.layers.5.")]:
            del metadata.state_dict_metadata[key]

    models.edit_metadata(path / "release", change)
    _, (finding,) = alone("CK114", path)
    assert (finding.actual, finding.tensor) == ("5 not stored", "decoder.layers.5.*")


def test_training_arguments_without_sizes_require_no_keys(fresh_megatron: PathOf, alone: RunAlone) -> None:
    path = fresh_megatron("qwen2-tied")
    edit_common(path, lambda common: common.update(args=Namespace(seed=1)))
    assert alone("CK114", path)[1] == []
    edit_common(path, lambda common: common.pop("args"))
    report = verify(path)
    assert report.findings == []
    assert [check.code for check in report.checks if check.status == "skipped"] == ["CK114", "CK701"]


# CK115


def rename(old: str, new: str) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for key in [key for key in metadata.state_dict_metadata if old in key]:
            metadata.state_dict_metadata[key.replace(old, new)] = metadata.state_dict_metadata.pop(key)
            for index in [index for index in metadata.storage_data if index.fqn == key]:
                moved = type(index)(key.replace(old, new), index.offset, index.index)
                metadata.storage_data[moved] = metadata.storage_data.pop(index)

    return change


def test_an_expert_with_a_key_of_its_own(fresh_megatron: PathOf, alone: RunAlone) -> None:
    path = fresh_megatron("glm4_moe")
    experts = "layers.3.mlp.experts.experts"
    models.edit_metadata(path / "release", rename(f"{experts}.linear_fc2.weight", f"{experts}.0.linear_fc2.weight"))
    _, (finding,) = alone("CK115", path)
    assert finding.expected == "no key of a single expert, as content_metadata says (singleton_local_shards)"


def test_per_layer_keys_that_the_arguments_ask_for(fresh_megatron: PathOf, alone: RunAlone) -> None:
    """A list as moe_layer_freq makes Megatron give each layer its keys, whatever non_homogeneous_layers says."""
    path = fresh_megatron("glm4_moe")
    edit_common(path, lambda common: common["content_metadata"].update(non_homogeneous_layers=False))
    assert alone("CK115", path)[1] == []


# CK111


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sharded_backend", "x"),
        ("sharded_backend_version", 2),
        ("common_backend", "x"),
        ("common_backend_version", 3),
    ],
)
def test_a_version_that_megatron_does_not_know(
    key: str, value: Any, fresh_megatron: PathOf, edit_json: Callable[..., None], alone: RunAlone
) -> None:
    path = fresh_megatron("qwen2-tied")
    edit_json(path / "release" / "metadata.json", **{key: value})
    _, (finding,) = alone("CK111", path)
    assert (finding.expected.split()[0], finding.actual) == (key, repr(value))


def test_metadata_that_later_megatron_omits_is_not_missed(
    fresh_megatron: PathOf, edit_json: Callable[..., None], alone: RunAlone
) -> None:
    path = fresh_megatron("qwen2-tied")
    edit_json(path / "release" / "metadata.json", common_backend=None, common_backend_version=None)
    assert alone("CK111", path)[1] == []


# CK107


def test_a_run_in_another_dtype_than_its_weights(fresh_megatron: PathOf, alone: RunAlone) -> None:
    path = fresh_megatron("qwen2-tied")
    edit_args(path, params_dtype=torch.bfloat16)
    assert alone("CK107", path)[1] == []
    edit_args(path, params_dtype=torch.float16)
    _, (finding,) = alone("CK107", path)
    assert (finding.expected, finding.actual) == ("params_dtype bfloat16, as most weights are", "params_dtype float16")
    assert (finding.severity, finding.file) == ("warning", str(path / "release" / "common.pt"))
