"""CK1xx: a good checkpoint is broken in one way, and exactly that is found, with its name and file."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import models
from support.fixture_types import CodesOf, CopyOf, OnlyFinding, PathOf
from support.installed import before
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from ckptkit.app.api import convert
from ckptkit.core.errors import CkptkitError
from verify.reports.headline import headline
from verify.run import verify

INDEX = "model.safetensors.index.json"
ALL = ["qwen2-tied", "qwen2-untied", "qwen3_moe", "glm4_moe"]


def shard_of(path: Path, name: str) -> Path:
    return path / json.loads((path / INDEX).read_text())["weight_map"][name]


def edit_index(path: Path, change: Callable[[dict[str, str]], None]) -> None:
    content = json.loads((path / INDEX).read_text())
    change(content["weight_map"])
    (path / INDEX).write_text(json.dumps(content))


def edit_header(path: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize("name", ALL)
def test_a_release_has_no_finding(name: str, releases: PathOf) -> None:
    report = verify(releases(name))
    assert report.findings == []
    assert report.status == "passed"
    assert {check.status for check in report.checks} == {"passed"}


@pytest.mark.parametrize("name", ALL)
def test_megatron_of_a_release_has_no_finding(name: str, converted: PathOf) -> None:
    report = verify(converted(name))
    assert report.findings == []
    assert {check.status for check in report.checks} == {"passed"}


def test_fused_experts_have_no_finding(releases: Callable[..., Path]) -> None:
    assert verify(releases("qwen3_moe", fused=True)).findings == []


def test_a_single_file_without_index_has_no_finding(tmp_path: Path) -> None:
    models.save("qwen2-tied", tmp_path / "one", shard_size="1GB")
    assert not (tmp_path / "one" / INDEX).exists()
    report = verify(tmp_path / "one")
    assert report.findings == []
    assert [check.code for check in report.checks if check.status != "passed"] == []
    assert "CK106" not in {check.code for check in report.checks}


def test_tensors_per_layer_are_reported(releases: PathOf) -> None:
    facts = verify(releases("glm4_moe")).facts["tensors per layer"]
    # dense: 2 norms, 4 projections, 3 biases, 2 q/k norms, 3 mlp; MoE: 11 + router and bias + 12 x 3 experts + 3 shared
    assert facts == ["dense layers {0..1}: 14 tensors each", "MoE layers {2..11}: 52 tensors each"]


def test_a_config_that_is_missing(releases: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    path = copy_of(releases("qwen2-tied"))
    (path / "config.json").unlink()
    finding = only(verify(path))
    assert (finding.code, finding.file) == ("CK101", str(path / "config.json"))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"model_type": "unheard_of"}',
        '{"model_type": "qwen2"}',
        '{"model_type": "qwen2", "hidden_size": "many"}',
    ],
)
def test_a_config_that_says_nothing_usable(text: str, releases: PathOf, copy_of: CopyOf, codes: CodesOf) -> None:
    path = copy_of(releases("qwen2-tied"))
    (path / "config.json").write_text(text)
    report = verify(path)
    assert codes(report) == ["CK101"]
    assert report.status == "failed"


def test_checks_that_read_weights_are_skipped_once_headers_are_wrong(releases: PathOf, copy_of: CopyOf) -> None:
    path = copy_of(releases("qwen2-tied"))
    (path / "config.json").unlink()
    by_code = {check.code: check for check in verify(path).checks}
    assert by_code["CK201"].status == "skipped"
    assert by_code["CK201"].reason == "not run because CK101 failed"
    assert by_code["CK102"].status == "passed"


def test_a_shard_that_is_missing(releases: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    path = copy_of(releases("glm4_moe"))
    shard = shard_of(path, "model.layers.5.mlp.experts.7.up_proj.weight")
    shard.unlink()
    finding = only(verify(path))
    assert (finding.code, finding.file) == ("CK102", str(shard))
    assert finding.actual == "missing"


@pytest.mark.parametrize(("change", "word"), [(-1, "truncated"), (-5000, "truncated"), (1, "trailing")])
def test_a_shard_of_the_wrong_size(
    change: int, word: str, releases: PathOf, copy_of: CopyOf, only: OnlyFinding
) -> None:
    path = copy_of(releases("glm4_moe"))
    shard = shard_of(path, "model.layers.0.input_layernorm.weight")
    size = shard.stat().st_size
    os.truncate(shard, size + change)
    finding = only(verify(path))
    assert (finding.code, finding.file) == ("CK102", str(shard))
    assert word in finding.actual
    assert str(size) in finding.expected
    assert str(size + change) in finding.actual


@pytest.mark.parametrize("content", [b"", b"12345678", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0[]"])
def test_a_shard_without_a_header(content: bytes, releases: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    path = copy_of(releases("qwen2-tied"))
    shard = shard_of(path, "model.norm.weight")
    shard.write_bytes(content)
    finding = only(verify(path))
    assert (finding.code, finding.file) == ("CK102", str(shard))


def test_tensors_that_overlap(releases: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    path = copy_of(releases("qwen2-tied"))
    shard = shard_of(path, "model.layers.3.self_attn.k_proj.bias")
    key, value = "model.layers.3.self_attn.k_proj.bias", "model.layers.3.self_attn.v_proj.bias"

    def change(header: dict[str, dict[str, object]]) -> None:
        header[value]["data_offsets"] = header[key]["data_offsets"]

    edit_header(shard, change)
    found = verify(path).findings
    assert {finding.code for finding in found} == {"CK102"}
    assert {finding.file for finding in found} == {str(shard)}
    assert any("overlaps" in finding.actual and {key, value} & finding.names for finding in found)


def test_a_name_twice_in_one_header(releases: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    path = copy_of(releases("qwen2-tied"))
    shard = shard_of(path, "model.norm.weight")
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    text = (
        content[8 : 8 + length].rstrip()[:-1]
        + b',"model.norm.weight":'
        + json.dumps(header["model.norm.weight"]).encode()
        + b"}"
    )
    shard.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    finding = only(verify(path))
    assert (finding.code, finding.tensor, finding.file) == ("CK102", "model.norm.weight", str(shard))


def test_several_broken_files_are_all_listed(releases: PathOf, copy_of: CopyOf) -> None:
    path = copy_of(releases("glm4_moe"))
    shards = sorted(path.glob("*.safetensors"))
    shards[2].unlink()
    os.truncate(shards[5], 100)
    os.truncate(shards[9], shards[9].stat().st_size - 8)
    found = verify(path).findings
    assert [(finding.code, finding.file) for finding in found] == [("CK102", str(shards[at])) for at in (2, 5, 9)]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}'])
def test_an_index_that_says_nothing(text: str, releases: PathOf, copy_of: CopyOf, codes: CodesOf) -> None:
    path = copy_of(releases("qwen2-tied"))
    (path / INDEX).write_text(text)
    assert codes(verify(path)) == ["CK103"]


def test_an_index_that_points_out_of_the_directory(releases: PathOf, copy_of: CopyOf) -> None:
    path = copy_of(releases("qwen2-tied"))
    edit_index(path, lambda names: names.update({"model.norm.weight": "../other/model.safetensors"}))
    found = verify(path).findings
    assert next(finding.code for finding in found if finding.tensor == "model.norm.weight") == "CK103"
    assert "../other" in found[0].actual


def test_many_shards_without_an_index(releases: PathOf, copy_of: CopyOf, codes: CodesOf) -> None:
    path = copy_of(releases("qwen2-tied"))
    (path / INDEX).unlink()
    assert codes(verify(path)) == ["CK103"]


def test_a_tensor_that_the_shards_lost(releases: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    path = copy_of(releases("glm4_moe"))
    models.edit(path, "model.layers.4.mlp.gate.weight", None)
    finding = only(verify(path))
    assert (finding.code, finding.tensor) == ("CK104", "model.layers.4.mlp.gate.weight")
    assert "in no shard" in finding.actual


@before("transformers", (5, 19, 0), "cuts the model into more shards, some of which would hold nothing then")
def test_a_tensor_that_shards_and_index_lost_together(
    releases: PathOf, copy_of: CopyOf, edit_json: Callable[..., None], only: OnlyFinding
) -> None:
    path = copy_of(releases("glm4_moe"))
    for expert in range(12):
        models.edit(path, f"model.layers.11.mlp.experts.{expert}.down_proj.weight", None)
    edit_index(
        path,
        lambda names: [names.pop(f"model.layers.11.mlp.experts.{expert}.down_proj.weight") for expert in range(12)],
    )
    total = sum(tensor.nbytes for tensor in models.tensors(path).values())
    edit_json(path / INDEX, metadata={"total_size": total})
    finding = only(verify(path))
    assert (finding.code, finding.tensor, finding.count) == (
        "CK104",
        "model.layers.11.mlp.experts.{0..11}.down_proj.weight",
        12,
    )
    assert "config.json promises" in finding.expected


def test_a_tensor_that_the_index_forgot(releases: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    path = copy_of(releases("qwen2-tied"))
    edit_index(path, lambda names: names.pop("model.layers.2.mlp.up_proj.weight"))
    finding = only(verify(path))
    assert (finding.code, finding.tensor, finding.file) == (
        "CK104",
        "model.layers.2.mlp.up_proj.weight",
        str(path / INDEX),
    )
    assert "not in the index" in finding.actual


def test_a_tensor_that_the_index_puts_elsewhere(releases: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    path = copy_of(releases("qwen2-tied"))
    other = sorted(path.glob("*.safetensors"))[-1].name
    edit_index(path, lambda names: names.update({"model.embed_tokens.weight": other}))
    finding = only(verify(path))
    assert (finding.code, finding.tensor) == ("CK104", "model.embed_tokens.weight")
    assert "another shard" in finding.actual


def test_a_tensor_in_two_shards(
    releases: PathOf, copy_of: CopyOf, codes: CodesOf, edit_json: Callable[..., None]
) -> None:
    path = copy_of(releases("qwen2-tied"))
    name = "model.norm.weight"
    other = next(file for file in sorted(path.glob("*.safetensors")) if file != shard_of(path, name))
    save_file(load_file(other) | {name: torch.ones(128, dtype=torch.bfloat16)}, other, metadata={"format": "pt"})
    found = verify(path).findings
    assert [(finding.code, finding.tensor) for finding in found] == [("CK104", name)]
    assert other.name in found[0].actual


def test_a_model_of_no_known_class_is_inconclusive_and_the_rest_is_looked_at(
    releases: PathOf, copy_of: CopyOf, edit_json: Callable[..., None]
) -> None:
    """It may well be right. Under a known class the type is wrong, which the mutations have."""
    path = copy_of(releases("qwen2-tied"))
    edit_json(path / "config.json", model_type="qwen9", architectures=["Qwen9ForCausalLM"])
    report = verify(path)
    assert (report.status, report.findings) == ("inconclusive", [])
    assert any("model_type 'qwen9' is not supported" in reason for reason in report.reasons)
    models.edit(path, "model.norm.weight", torch.zeros(128, dtype=torch.bfloat16))
    assert [one.code for one in verify(path).findings] == ["CK205"]


def test_a_leftover_file(releases: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    path = copy_of(releases("qwen2-tied"))
    save_file({"model.norm.weight": torch.ones(128, dtype=torch.bfloat16)}, path / "old.safetensors")
    finding = only(verify(path))
    assert (finding.code, finding.file) == ("CK104", str(path / "old.safetensors"))


@pytest.mark.parametrize("file", ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors"])
def test_what_mistral_publishes_beside_its_shards_is_a_warning(
    file: str, releases: PathOf, copy_of: CopyOf, only: OnlyFinding
) -> None:
    path = copy_of(releases("qwen2-tied"))
    save_file({"tok_embeddings.weight": torch.ones(8, 128, dtype=torch.bfloat16)}, path / file)
    report = verify(path)
    finding = only(report)
    assert (finding.code, finding.severity, finding.file, report.status) == (
        "CK104",
        "warning",
        str(path / file),
        "passed",
    )
    assert "Mistral's own names" in finding.actual


def test_what_mistral_publishes_beside_a_single_file_is_a_warning(tmp_path: Path, only: OnlyFinding) -> None:
    """As SGLang leaves it out (`filter_duplicate_safetensors_files`)."""
    path = tmp_path / "one"
    models.save("qwen2-tied", path, shard_size="1GB")
    assert not (path / "model.safetensors.index.json").exists()
    save_file({"tok_embeddings.weight": torch.ones(8, 128, dtype=torch.bfloat16)}, path / "consolidated.safetensors")
    report = verify(path)
    finding = only(report)
    assert (finding.code, finding.severity, report.status) == ("CK104", "warning", "passed")
    assert "Mistral's own names" in finding.actual


def test_leftover_named_like_mistrals_extra_file_is_found(releases: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    path = copy_of(releases("qwen2-tied"))
    save_file({"model.norm.weight": torch.ones(128, dtype=torch.bfloat16)}, path / "consolidated.safetensors")
    finding = only(verify(path))
    assert (finding.code, finding.severity) == ("CK104", "error")


def test_layer_beyond_the_configs_count_is_found(
    releases: PathOf, copy_of: CopyOf, edit_json: Callable[..., None], codes: CodesOf
) -> None:
    path = copy_of(releases("qwen2-tied"))
    edit_json(path / "config.json", num_hidden_layers=11, layer_types=None, max_window_layers=None)
    found = verify(path).findings
    assert {finding.code for finding in found} == {"CK104"}
    assert {finding.tensor for finding in found} >= {"model.layers.11.mlp.gate_proj.weight"}
    assert "num_hidden_layers" in found[0].hint


def test_layer_missing_from_the_configs_count_is_found(
    releases: PathOf, copy_of: CopyOf, edit_json: Callable[..., None]
) -> None:
    path = copy_of(releases("qwen2-tied"))
    edit_json(path / "config.json", num_hidden_layers=13, layer_types=None, max_window_layers=None)
    found = verify(path).findings
    assert {finding.code for finding in found} == {"CK104"}
    assert {finding.tensor for finding in found} >= {"model.layers.12.mlp.gate_proj.weight"}


def test_an_output_layer_of_its_own_beside_a_tied_config(
    releases: PathOf, copy_of: CopyOf, edit_json: Callable[..., None], only: OnlyFinding
) -> None:
    path = copy_of(releases("qwen2-untied"))
    edit_json(path / "config.json", tie_word_embeddings=True)
    finding = only(verify(path))
    assert (finding.code, finding.tensor) == ("CK211", "lm_head.weight")
    assert "tie_word_embeddings" in finding.hint


def test_uneven_layers_without_a_usable_config_are_found(
    releases: PathOf, copy_of: CopyOf, edit_json: Callable[..., None]
) -> None:
    path = copy_of(releases("glm4_moe"))
    edit_json(path / "config.json", model_type="unheard_of")
    models.edit(path, "model.layers.6.mlp.gate.weight", None)
    edit_index(path, lambda names: names.pop("model.layers.6.mlp.gate.weight"))
    found = verify(path).findings
    assert ("CK104", "layers.6.mlp.gate.weight") in [(finding.code, finding.tensor) for finding in found]


def test_expert_missing_in_every_layer_without_a_usable_config_is_found(
    releases: PathOf, copy_of: CopyOf, edit_json: Callable[..., None]
) -> None:
    path = copy_of(releases("glm4_moe"))
    edit_json(path / "config.json", model_type="unheard_of")
    lost = [f"model.layers.{layer}.mlp.experts.11.down_proj.weight" for layer in range(2, 12)]
    for name in lost:
        models.edit(path, name, None)
    edit_index(path, lambda names: [names.pop(name) for name in lost])
    found = [(finding.code, finding.tensor, finding.actual) for finding in verify(path).findings]
    assert ("CK104", "experts.11.down_proj.weight", "missing") in found


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("qwen2-tied", "model.embed_tokens.weight", (312, 128)),
        ("qwen2-tied", "model.layers.7.mlp.down_proj.weight", (288, 128)),
        ("glm4_moe", "model.layers.7.mlp.gate.weight", (11, 128)),
    ],
)
def test_a_shape_that_is_not_the_configs(
    name: str,
    tensor: str,
    shape: tuple[int, int],
    releases: PathOf,
    copy_of: CopyOf,
    edit_json: Callable[..., None],
    only: OnlyFinding,
) -> None:
    path = copy_of(releases(name))
    models.edit(path, tensor, torch.randn(shape).bfloat16())
    total = sum(one.nbytes for one in models.tensors(path).values())
    edit_json(path / INDEX, metadata={"total_size": total})
    finding = only(verify(path))
    assert (finding.code, finding.tensor, finding.file) == ("CK105", tensor, str(shard_of(path, tensor)))
    assert str(list(shape)) in finding.actual


def test_a_vocabulary_cut_to_the_tokenizer_in_the_config(
    releases: PathOf, copy_of: CopyOf, edit_json: Callable[..., None], codes: CodesOf
) -> None:
    path = copy_of(releases("qwen2-untied"))
    edit_json(path / "config.json", vocab_size=300)
    report = verify(path)
    assert codes(report) == ["CK105"]
    assert {finding.tensor for finding in report.findings} == {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("metadata", [{"total_size": 27489}, {"total_size": 0}, {}, None])
def test_a_total_size_that_is_not_the_sum(
    metadata: object, releases: PathOf, copy_of: CopyOf, edit_json: Callable[..., None], only: OnlyFinding
) -> None:
    path = copy_of(releases("qwen2-tied"))
    edit_json(path / INDEX, metadata=metadata)
    report = verify(path)
    finding = only(report)
    assert (finding.code, finding.severity, report.status) == ("CK106", "warning", "passed")
    assert finding.expected == f"total_size {sum(tensor.nbytes for tensor in models.tensors(path).values())}"


def test_a_total_size_that_counts_rows(
    releases: PathOf, copy_of: CopyOf, edit_json: Callable[..., None], only: OnlyFinding
) -> None:
    """As slime's and Relax's converters to INT4 and FP8 write it."""
    path = copy_of(releases("qwen2-tied"))
    rows = sum(len(tensor) for tensor in models.tensors(path).values())
    edit_json(path / INDEX, metadata={"total_size": rows})
    assert only(verify(path)).actual == f"total_size {rows}, which is the number of rows"


def test_one_layer_in_another_dtype(releases: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    path = copy_of(releases("qwen2-tied"))
    name = "model.layers.9.self_attn.o_proj.weight"
    models.edit(path, name, models.tensors(path)[name].half())
    finding = only(verify(path))
    assert (finding.code, finding.tensor, finding.expected, finding.actual) == (
        "CK107",
        name,
        "bfloat16, as in the other layers",
        "float16",
    )


def test_a_router_bias_in_bf16_is_a_warning_without_a_source(
    releases: PathOf, copy_of: CopyOf, edit_json: Callable[..., None], only: OnlyFinding
) -> None:
    path = copy_of(releases("glm4_moe"))
    for layer in range(2, 12):
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        models.edit(path, name, models.tensors(path)[name].bfloat16())
    edit_json(path / INDEX, metadata={"total_size": sum(one.nbytes for one in models.tensors(path).values())})
    report = verify(path)
    finding = only(report)
    assert (finding.code, finding.severity, finding.count) == ("CK107", "warning", 10)
    assert finding.tensor == "model.layers.{2..11}.mlp.gate.e_score_correction_bias"
    assert report.status == "passed"


# Megatron


@pytest.mark.parametrize("text", ["iter_one", "7", ""])
def test_tracker_that_names_no_iteration_is_found(
    text: str, converted: PathOf, copy_of: CopyOf, only: OnlyFinding
) -> None:
    path = copy_of(converted("qwen2-tied"))
    (path / "latest_checkpointed_iteration.txt").write_text(text)
    finding = only(verify(path))
    assert (finding.code, finding.file) == ("CK111", str(path / "latest_checkpointed_iteration.txt"))


@pytest.mark.parametrize("file", [".metadata", "metadata.json", "common.pt"])
def test_a_megatron_file_that_is_missing(file: str, converted: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    path = copy_of(converted("qwen2-tied"))
    (path / "release" / file).unlink()
    finding = only(verify(path))
    assert finding.code == "CK111"
    assert str(path / "release") in (finding.file or "")
    assert file in finding.actual


@pytest.mark.parametrize("file", [".metadata", "metadata.json", "common.pt"])
def test_a_megatron_file_that_is_garbage(file: str, converted: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    path = copy_of(converted("qwen2-tied"))
    (path / "release" / file).write_bytes(b"garbage")
    assert only(verify(path)).code == "CK111"


def test_checkpoint_of_another_backend_is_found(converted: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    path = copy_of(converted("qwen2-tied"))
    (path / "release" / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    finding = only(verify(path))
    assert (finding.code, finding.actual) == ("CK111", "'zarr'")


def test_an_iteration_without_the_root_is_verified_too(converted: PathOf) -> None:
    report = verify(converted("qwen2-tied") / "release")
    assert report.findings == []


@pytest.fixture(scope="session")
def in_four_files(tmp_path_factory: pytest.TempPathFactory, releases: PathOf) -> Path:
    """A Megatron checkpoint in several .distcp files."""
    path = tmp_path_factory.mktemp("four") / "megatron"
    convert(releases("qwen2-tied"), path, max_shard_size=600_000)
    assert len(list((path / "release").glob("*.distcp"))) > 3
    return path


def test_a_distcp_file_that_is_missing(converted: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    path = copy_of(converted("qwen2-tied"))
    (path / "release" / "__0_0.distcp").unlink()
    report = verify(path)
    finding = only(report)
    assert (finding.code, finding.file) == ("CK112", str(path / "release" / "__0_0.distcp"))
    assert finding.actual.startswith(f"release/__0_0.distcp is missing: all {finding.count} entries")
    assert headline(report).startswith("release/__0_0.distcp is missing")


@pytest.mark.parametrize("left", [0.0, 0.1, 0.5, 0.999999])
@pytest.mark.parametrize("with_source", [False, True])
def test_a_distcp_file_that_is_truncated_is_one_finding(
    left: float, with_source: bool, releases: PathOf, converted: PathOf, copy_of: CopyOf, only: OnlyFinding
) -> None:
    path = copy_of(converted("qwen2-tied"))
    file = path / "release" / "__0_0.distcp"
    os.truncate(file, int(file.stat().st_size * left))
    report = verify(path, releases("qwen2-tied") if with_source else None)
    finding = only(report)
    assert (finding.code, finding.file) == ("CK112", str(file))
    assert finding.count == len(finding.names) > 0
    assert headline(report).startswith("release/__0_0.distcp is cut off: ")


def test_several_damaged_distcp_files_are_a_finding_each(in_four_files: Path, copy_of: CopyOf) -> None:
    path = copy_of(in_four_files)
    gone, also, short, _, *_ = sorted((path / "release").glob("*.distcp"))
    for file in (gone, also):
        file.unlink()
    os.truncate(short, short.stat().st_size // 2)
    found = {finding.file: finding for finding in verify(path).findings}
    assert found.keys() == {str(path / "release"), str(short)}
    assert f"{gone.name} and 1 more are missing" in found[str(path / "release")].actual


@pytest.mark.parametrize("with_source", [False, True])
@pytest.mark.parametrize("left", [0, 4, 0.001, 0.5, 0.999, None])
def test_a_damaged_shard_is_one_finding(
    left: float | None, with_source: bool, releases: PathOf, copy_of: CopyOf, only: OnlyFinding
) -> None:
    path = copy_of(releases("qwen2-tied"))
    shard = sorted(path.glob("*.safetensors"))[3]
    if left is None:
        shard.unlink()
    else:
        os.truncate(shard, left if isinstance(left, int) else int(shard.stat().st_size * left))
    finding = only(verify(path, releases("qwen2-tied") if with_source else None))
    assert (finding.code, finding.file, finding.tensor) == ("CK102", str(shard), None)


def test_many_entries_of_one_header_are_one_finding(releases: PathOf, copy_of: CopyOf) -> None:
    path = copy_of(releases("qwen2-tied"))
    shard = max(path.glob("*.safetensors"), key=lambda file: len(load_file(file)))
    names = sorted(load_file(shard))

    def change(header: dict[str, dict[str, object]]) -> None:
        for name in names[1:]:
            header[name]["dtype"] = "F16_OF_TOMORROW"

    edit_header(shard, change)
    finding = next(one for one in verify(path).findings if one.code == "CK102")
    assert (finding.file, finding.names) == (str(shard), set(names[1:]))


def test_entries_that_share_bytes(converted: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    path = copy_of(converted("qwen2-tied"))

    def change(metadata: Metadata) -> None:
        info = next(
            info
            for index, info in metadata.storage_data.items()
            if index.fqn == "decoder.layers.4.mlp.linear_fc1.weight"
        )
        info.offset -= 10

    models.edit_metadata(path / "release", change)
    assert only(verify(path)).code == "CK112"


def test_a_distcp_file_that_nothing_names(converted: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    path = copy_of(converted("qwen2-tied"))
    (path / "release" / "__7_0.distcp").write_bytes(b"old")
    finding = only(verify(path))
    assert (finding.code, finding.severity, finding.file) == (
        "CK112",
        "warning",
        str(path / "release" / "__7_0.distcp"),
    )


@pytest.mark.parametrize(("offset", "size"), [(0, 100), (20, 108)])
def test_chunks_that_leave_a_hole(
    offset: int, size: int, converted: PathOf, copy_of: CopyOf, only: OnlyFinding
) -> None:
    path = copy_of(converted("qwen2-tied"))
    key = "decoder.layers.2.self_attention.linear_proj.weight"

    def change(metadata: Metadata) -> None:
        chunk = ChunkStorageMetadata(torch.Size([offset, 0]), torch.Size([size, 320]))
        metadata.state_dict_metadata[key].chunks = [chunk]
        old = next(index for index in metadata.storage_data if index.fqn == key)
        metadata.storage_data[type(old)(key, chunk.offsets, 0)] = metadata.storage_data.pop(old)

    models.edit_metadata(path / "release", change)
    finding = only(verify(path))
    assert (finding.code, finding.tensor) == ("CK113", key)
    assert "elements are in no chunk" in finding.actual


def test_an_expert_that_no_chunk_holds(converted: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    path = copy_of(converted("glm4_moe"))
    key = "decoder.layers.2.mlp.experts.experts.linear_fc2.weight"
    models.edit_metadata(path / "release", lambda metadata: metadata.state_dict_metadata[key].chunks.pop(5))
    finding = only(verify(path))
    assert (finding.code, finding.tensor) == ("CK113", key)
    assert finding.actual.startswith(f"{128 * 96} of")


def test_a_piece_that_lies_nowhere(converted: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    """torch ends with `KeyError: MetadataIndex(...)`."""
    path, key = copy_of(converted("qwen2-tied")), "decoder.layers.2.self_attention.linear_proj.weight"

    def change(metadata: Metadata) -> None:
        del metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == key)]

    models.edit_metadata(path / "release", change)
    finding = only(verify(path))
    assert finding.code == "CK111"
    assert f".metadata does not say where {key} at (0, 0) is stored" in finding.actual


def test_a_key_that_metadata_lost(converted: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    path = copy_of(converted("glm4_moe"))
    models.edit_metadata(
        path / "release", lambda metadata: metadata.state_dict_metadata.pop("decoder.layers.3.mlp.router.expert_bias")
    )
    finding = only(verify(path))
    assert (finding.code, finding.tensor) == ("CK104", "decoder.layers.3.mlp.router.expert_bias")
    assert "config.json promises" in finding.expected


def test_megatron_may_pad_the_vocabulary_and_nothing_else(releases: PathOf, tmp_path: Path) -> None:
    from ckptkit.core.specs import TensorSpec
    from ckptkit.formats.hf.reader import HfCheckpoint
    from ckptkit.formats.torch_dist.writer import TorchDistFiles
    from ckptkit.transfer.files import FilesWriter
    from converters.planner import to_megatron

    view = to_megatron(HfCheckpoint(releases("qwen2-tied")), "test")
    padded = {"embedding.word_embeddings.weight": (384, 128), "decoder.final_layernorm.weight": (130,)}
    specs = {name: TensorSpec(name, padded.get(name, spec.shape), spec.dtype) for name, spec in view.specs.items()}
    (tmp_path / "padded").mkdir()
    writer = FilesWriter(tmp_path / "padded", TorchDistFiles(specs, {"num_layers": 12}))
    for name, tensor in view.read(list(view.specs)).items():
        grown = torch.randn(specs[name].shape).bfloat16() if name in padded else tensor
        writer.write(name, grown)
    writer.finish()
    found = verify(tmp_path / "padded", hf=releases("qwen2-tied")).findings
    assert [(finding.code, finding.tensor) for finding in found if finding.code != "CK701"] == [
        ("CK105", "decoder.final_layernorm.weight")
    ]


def test_without_a_config_beside_megatron_what_needs_it_is_skipped(converted: PathOf, copy_of: CopyOf) -> None:
    path = copy_of(converted("qwen2-tied") / "release")
    report = verify(path)
    skipped = {check.code: check.reason for check in report.checks if check.status == "skipped"}
    assert set(skipped) == {"CK101", "CK105", "CK209", "CK701"}
    assert "--hf" in (skipped["CK101"] or "")
    assert report.findings == []


@pytest.mark.parametrize("content", [{}, {"notes.txt": "hello"}, {"pytorch_model.bin": "x"}])
def test_a_directory_without_a_checkpoint_is_bad_input(content: dict[str, str], tmp_path: Path) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CkptkitError, match="holds no checkpoint"):
        verify(tmp_path)


def test_paths_that_do_not_exist_are_bad_input(tmp_path: Path, releases: PathOf) -> None:
    with pytest.raises(CkptkitError, match="does not exist"):
        verify(tmp_path / "nowhere")
    with pytest.raises(CkptkitError, match="does not exist"):
        verify(releases("qwen2-tied"), source=tmp_path / "nowhere")


def test_training_arguments_that_are_no_namespace(converted: PathOf, copy_of: CopyOf, only: OnlyFinding) -> None:
    path = copy_of(converted("qwen2-tied"))
    torch.save({"args": "--num-layers 12", "iteration": 0}, path / "release" / "common.pt")
    assert only(verify(path)).code == "CK111"
    torch.save({"args": Namespace(), "iteration": 0}, path / "release" / "common.pt")
    assert "CK111" not in {finding.code for finding in verify(path).findings}
