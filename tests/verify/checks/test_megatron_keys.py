"""CK114 to CK117, CK111 and CK107: a torch_dist checkpoint wrong in one way; what real Megatron writes is silent."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import models
from support.fixture_types import CopyOf, PathOf, RunAlone
from support.megatron_saves import SAVES

CODES = ["CK114", "CK115", "CK116", "CK117"]
LABELS = [label for label, (_, how) in SAVES.items() if "legacy" not in how and "fsdp2" not in how]


def edit_common(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    common = torch.load(path / "release" / "common.pt", weights_only=False)
    change(common)
    torch.save(common, path / "release" / "common.pt")


def edit_args(path: Path, **changes: Any) -> None:
    edit_common(path, lambda common: common.update(args=Namespace(**(vars(common["args"]) | changes))))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", ["qwen2-tied", "qwen2-untied", "qwen3_moe", "glm4_moe"])
def test_what_ckptkit_writes_is_silent(code: str, name: str, converted: PathOf, alone: RunAlone) -> None:
    result, found = alone(code, converted(name))
    assert found == []
    assert result is not None
    assert result.status == "passed"
    assert result.tensors_compared > 40


@pytest.mark.parametrize("label", LABELS)
def test_what_megatron_writes_is_silent(label: str, saved: Path, alone: RunAlone) -> None:
    for code in CODES:
        result, found = alone(code, saved / label)
        assert found == [], code
        assert result is not None
        assert result.status == "passed"


@pytest.mark.parametrize("code", CODES)
def test_an_hf_directory_has_no_keys(code: str, releases: PathOf, alone: RunAlone) -> None:
    assert alone(code, releases("qwen2-tied")) == (None, [])


# CK114


TIED = "untie_embeddings_and_output_weights"


@pytest.mark.parametrize(
    ("changes", "expected", "actual", "tensor"),
    [
        ({"num_layers": 13}, "num_layers: 13 decoder layers", "12 not stored", "decoder.layers.12.*"),
        ({"num_layers": 10}, "num_layers: 10 decoder layers", "{10..11} also stored", "decoder.layers.{10..11}.*"),
        ({"mtp_num_layers": 1}, "mtp_num_layers: 1 multi-token prediction layers", "none stored", "mtp.layers.0.*"),
        (
            {"vocab_size": 353},
            "vocab_size: 353, so at least as many rows",
            "352 rows",
            "embedding.word_embeddings.weight",
        ),
        ({TIED: True}, f"{TIED}: True, so an output layer", "output_layer.weight is not stored", "output_layer.weight"),
    ],
)
def test_arguments_of_another_run(
    changes: dict[str, Any],
    expected: str,
    actual: str,
    tensor: str,
    converted: PathOf,
    copy_of: CopyOf,
    alone: RunAlone,
) -> None:
    path = copy_of(converted("qwen2-tied"))
    edit_args(path, **changes)
    _, (finding,) = alone("CK114", path)
    assert (finding.expected, finding.actual, finding.tensor) == (expected, actual, tensor)
    assert finding.file == str(path / "release" / ".metadata")


def test_an_output_layer_that_arguments_tie(converted: PathOf, copy_of: CopyOf, alone: RunAlone) -> None:
    path = copy_of(converted("qwen2-untied"))
    edit_args(path, untie_embeddings_and_output_weights=False)
    _, (finding,) = alone("CK114", path)
    assert (finding.expected, finding.tensor) == (
        "untie_embeddings_and_output_weights: False, so no output layer",
        "output_layer.weight",
    )


@pytest.mark.parametrize(
    ("experts", "actual", "which"),
    [
        (13, "12 not stored", "12"),
        (8, "{8..11} also stored", "{8..11}"),
        (None, "{0..11} also stored", "{0..11}"),
    ],
)
def test_another_number_of_experts(
    experts: int | None, actual: str, which: str, converted: PathOf, copy_of: CopyOf, alone: RunAlone
) -> None:
    path = copy_of(converted("glm4_moe"))
    edit_args(path, num_experts=experts)
    found = alone("CK114", path)[1]
    places = "decoder.layers.{2..11}.mlp.experts"
    assert {finding.expected for finding in found} == {
        f"num_experts: {experts or 0} experts in {places} linear_fc{part}.weight" for part in (1, 2)
    }
    assert {finding.actual for finding in found} == {actual}
    assert {finding.tensor for finding in found} == {
        f"{places}.experts.{which}.linear_fc{part}.weight" for part in (1, 2)
    }
    # 10 layers with so many experts too few or too many
    assert {finding.count for finding in found} == {10 * {13: 1, 8: 4, None: 12}[experts]}


def test_a_layer_that_the_save_lost(converted: PathOf, copy_of: CopyOf, alone: RunAlone) -> None:
    """Without the HF config, which is the case for a run's own saves, only the arguments tell."""
    path = copy_of(converted("qwen2-tied"))

    def change(metadata: Any) -> None:
        for key in [key for key in metadata.state_dict_metadata if key.startswith("decoder.layers.5.")]:
            del metadata.state_dict_metadata[key]

    models.edit_metadata(path / "release", change)
    _, (finding,) = alone("CK114", path)
    assert (finding.actual, finding.tensor) == ("5 not stored", "decoder.layers.5.*")


def test_training_arguments_without_sizes_require_no_keys(converted: PathOf, copy_of: CopyOf, alone: RunAlone) -> None:
    path = copy_of(converted("qwen2-tied"))
    edit_common(path, lambda common: common.update(args=Namespace(seed=1)))
    assert alone("CK114", path)[1] == []
    edit_common(path, lambda common: common.pop("args"))
    result, _ = alone("CK114", path)
    assert result is not None
    assert (result.status, "no training arguments" in (result.reason or "")) == ("skipped", True)


# CK115


@pytest.mark.parametrize(
    ("name", "said", "expected", "actual"),
    [
        (
            "qwen2-tied",
            {"non_homogeneous_layers": False},
            "layers stacked, as content_metadata says (non_homogeneous_layers)",
            "one key a layer",
        ),
        (
            "glm4_moe",
            {"singleton_local_shards": True},
            "gate and up apart, as content_metadata says (singleton_local_shards)",
            "experts, gate and up together",
        ),
    ],
)
def test_another_layout_than_said(
    name: str, said: dict[str, bool], expected: str, actual: str, converted: PathOf, copy_of: CopyOf, alone: RunAlone
) -> None:
    path = copy_of(converted(name))
    edit_common(path, lambda common: common["content_metadata"].update(said))
    found = alone("CK115", path)[1]
    assert [finding.code for finding in found] == ["CK115"]
    assert found[0].expected == expected
    assert found[0].file == str(path / "release")
    assert found[0].count > 10


def rename(old: str, new: str) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for key in [key for key in metadata.state_dict_metadata if old in key]:
            metadata.state_dict_metadata[key.replace(old, new)] = metadata.state_dict_metadata.pop(key)
            for index in [index for index in metadata.storage_data if index.fqn == key]:
                metadata.storage_data[type(index)(key.replace(old, new), index.offset, index.index)] = (
                    metadata.storage_data.pop(index)
                )

    return change


def test_stacked_and_single_layers_in_one_checkpoint(converted: PathOf, copy_of: CopyOf, alone: RunAlone) -> None:
    path = copy_of(converted("qwen2-tied"))
    models.edit_metadata(
        path / "release", rename("decoder.layers.3.mlp.linear_fc2.weight", "decoder.layers.mlp.linear_fc2.weight")
    )
    _, (finding,) = alone("CK115", path)
    assert (finding.expected, finding.tensor) == (
        "all layers stacked, or one key each",
        "decoder.layers.mlp.linear_fc2.weight",
    )


def test_an_expert_with_a_key_of_its_own(converted: PathOf, copy_of: CopyOf, alone: RunAlone) -> None:
    path = copy_of(converted("glm4_moe"))
    models.edit_metadata(
        path / "release",
        rename("layers.3.mlp.experts.experts.linear_fc2.weight", "layers.3.mlp.experts.experts.0.linear_fc2.weight"),
    )
    _, (finding,) = alone("CK115", path)
    assert finding.expected == "no key of a single expert, as content_metadata says (singleton_local_shards)"


def test_per_layer_keys_that_the_arguments_ask_for(converted: PathOf, copy_of: CopyOf, alone: RunAlone) -> None:
    """A list as moe_layer_freq makes Megatron give each layer its keys, whatever non_homogeneous_layers says."""
    path = copy_of(converted("glm4_moe"))
    edit_common(path, lambda common: common["content_metadata"].update(non_homogeneous_layers=False))
    assert alone("CK115", path)[1] == []


# CK116


def drop(ending: str) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for key in [key for key in metadata.state_dict_metadata if key.endswith(ending)]:
            del metadata.state_dict_metadata[key]

    return change


def test_an_extra_state_that_is_missing(converted: PathOf, copy_of: CopyOf, alone: RunAlone) -> None:
    path = copy_of(converted("glm4_moe"))
    models.edit_metadata(path / "release", drop("self_attention.linear_proj._extra_state/shard_0_1"))
    _, (finding,) = alone("CK116", path)
    assert (finding.tensor, finding.count) == ("decoder.layers.{0..11}.self_attention.linear_proj._extra_state", 12)


def test_an_experts_extra_state_that_is_missing(converted: PathOf, copy_of: CopyOf, alone: RunAlone) -> None:
    path = copy_of(converted("glm4_moe"))
    models.edit_metadata(path / "release", drop("layers.4.mlp.experts.experts.linear_fc1._extra_state/shard_7_12"))
    _, (finding,) = alone("CK116", path)
    assert (finding.expected, finding.actual) == ("12 shards of it", "11")
    assert finding.tensor == "decoder.layers.4.mlp.experts.experts.linear_fc1._extra_state"


# CK117


def test_an_entry_that_is_too_short_for_its_dtype(converted: PathOf, copy_of: CopyOf, alone: RunAlone) -> None:
    path = copy_of(converted("qwen2-tied"))
    key = "decoder.layers.7.mlp.linear_fc2.weight"

    def change(metadata: Any) -> None:
        metadata.state_dict_metadata[key].properties.dtype = torch.float64

    models.edit_metadata(path / "release", change)
    _, (finding,) = alone("CK117", path)
    # 128 x 288 numbers of 8 bytes, of which bfloat16 holds a quarter
    assert (finding.tensor, finding.expected) == (key, "at least 294912 bytes for [128, 288] float64")


def test_bytes_behind_the_last_entry(converted: PathOf, copy_of: CopyOf, alone: RunAlone) -> None:
    path = copy_of(converted("qwen2-tied"))
    file = path / "release" / "__0_0.distcp"
    size = file.stat().st_size
    with file.open("ab") as stream:
        stream.write(b"\0" * 100)
    _, (finding,) = alone("CK117", path)
    assert (finding.expected, finding.actual) == (f"{size} bytes", f"{size + 100} bytes: 100 behind its last entry")
    assert (finding.severity, finding.file) == ("warning", str(file))


# CK111


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sharded_backend", "zarr"),
        ("sharded_backend_version", 2),
        ("common_backend", "msgpack"),
        ("common_backend_version", 3),
    ],
)
def test_a_version_that_megatron_does_not_know(
    key: str, value: Any, converted: PathOf, copy_of: CopyOf, edit_json: Callable[..., None], alone: RunAlone
) -> None:
    path = copy_of(converted("qwen2-tied"))
    edit_json(path / "release" / "metadata.json", **{key: value})
    _, (finding,) = alone("CK111", path)
    assert (finding.expected.split()[0], finding.actual) == (key, repr(value))


def test_metadata_that_later_megatron_omits_is_not_missed(
    converted: PathOf, copy_of: CopyOf, edit_json: Callable[..., None], alone: RunAlone
) -> None:
    path = copy_of(converted("qwen2-tied"))
    edit_json(path / "release" / "metadata.json", common_backend=None, common_backend_version=None)
    assert alone("CK111", path)[1] == []


# CK107


def test_a_run_in_another_dtype_than_its_weights(converted: PathOf, copy_of: CopyOf, alone: RunAlone) -> None:
    path = copy_of(converted("qwen2-tied"))
    edit_args(path, params_dtype=torch.bfloat16)
    assert alone("CK107", path)[1] == []
    edit_args(path, params_dtype=torch.float16)
    _, (finding,) = alone("CK107", path)
    assert (finding.expected, finding.actual) == ("params_dtype bfloat16, as most weights are", "params_dtype float16")
    assert (finding.severity, finding.file) == ("warning", str(path / "release" / "common.pt"))
