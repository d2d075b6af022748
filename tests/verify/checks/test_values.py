"""CK2xx: values are compared with a source in any combination of formats, and judged without one."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import HF_CASES, case
from mutations import edits
from safetensors.torch import save_file
from support import models
from support.fixture_types import OnlyFinding, PathOf, RunAlone
from support.messages import text_with
from support.other_models import save_small
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ckptkit.app.api import quantize
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.formats.torch_dist.writer import TorchDistFiles
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.transfer.copy import copy
from ckptkit.transfer.files import FilesWriter
from ckptkit.verify.checks.values import values
from ckptkit.verify.core.check import Tally
from ckptkit.verify.core.report import Report
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.extremes import extremes, same_bytes
from ckptkit.verify.reports.text import headline
from ckptkit.verify.run import verify

BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"


def compared(report: Report, code: str) -> int:
    return next(check.tensors_compared for check in report.checks if check.code == code)


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize("direction", ["hf-hf", "hf-megatron", "megatron-hf", "megatron-megatron"])
def test_values_of_one_model_in_any_two_formats_are_equal(
    name: str, direction: str, releases: PathOf, converted: PathOf
) -> None:
    sides = {"hf": releases(name), "megatron": converted(name)}
    checkpoint, source = (sides[side] for side in direction.split("-"))
    report = verify(checkpoint, source=source)
    assert report.findings == []
    assert compared(report, "CK202") == len(models.tensors(releases(name)))


@pytest.mark.parametrize("against", ["unfused", "megatron"])
def test_fused_experts_are_compared_one_by_one(against: str, releases: PathOf, converted: PathOf) -> None:
    source = releases("glm4_moe") if against == "unfused" else converted("glm4_moe")
    report = verify(releases("glm4_moe", fused=True), source=source)
    assert report.findings == []
    assert compared(report, "CK202") == len(models.tensors(releases("glm4_moe")))


@pytest.mark.parametrize(("by", "words"), [(1.0, "is 1 more than"), (-1.0, "is 1 less than"), (0.5, "elements differ")])
def test_norms_that_another_convention_shifts_are_said_to_be(
    by: float, words: str, releases: PathOf, fresh: PathOf, only: OnlyFinding
) -> None:
    """Some classes multiply by w, others by 1 + w; a converter between them moves the numbers by 1."""
    path, name = fresh("qwen2-tied"), "model.layers.3.input_layernorm.weight"
    models.edit(path, name, models.tensors(path)[name] + by)
    finding = only(verify(path, source=releases("qwen2-tied")))
    assert (finding.code, finding.tensor) == ("CK202", name)
    assert words in finding.actual


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small("starcoder2", tmp_path_factory.mktemp("starcoder2"))


@pytest.mark.parametrize("kind", ["input_layernorm", "mlp.c_fc", "self_attn.q_proj"])
def test_tensors_of_another_name_with_the_values_of_the_source_are_said_to_be(
    kind: str, other: Path, tmp_path: Path
) -> None:
    path, new = tmp_path / "renamed", kind + "_b"
    shutil.copytree(other, path)
    content = {name.replace(kind, new): tensor for name, tensor in models.tensors(other).items()}
    save_file(content, path / "model.safetensors", {"format": "pt"})
    found = [one for one in verify(path, source=other).findings if one.code == "CK202"]
    assert {one.tensor for one in found} == {f"model.layers.{{0..1}}.{kind}.{leaf}" for leaf in ("weight", "bias")}
    assert all(f"model.layers.{{0..1}}.{new}" in one.actual for one in found)


def test_a_renamed_tensor_with_other_values_is_missing_and_unknown(other: Path, tmp_path: Path) -> None:
    path, old, new = tmp_path / "renamed", "mlp.c_fc.weight", "mlp.fc.weight"
    shutil.copytree(other, path)
    content = {name.replace(old, new): tensor for name, tensor in models.tensors(other).items()}
    content[f"model.layers.1.{new}"] += 1
    save_file(content, path / "model.safetensors", {"format": "pt"})
    found = [one for one in verify(path, source=other).findings if one.code == "CK202"]
    assert {one.tensor for one in found} == {f"model.layers.{{0..1}}.{name}" for name in (old, new)}


@pytest.mark.parametrize("fused", [False, True])
def test_square_tensors_that_are_transposed_are_said_to_be(fused: bool, tmp_path: Path) -> None:
    """Of a fused tensor of experts the parts are compared, and the whole is named."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}
    experts = {"num_experts": 12, "moe_intermediate_size": 32, "intermediate_size": 96, "num_hidden_layers": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts)).to(torch.bfloat16)
    for key, parameter in model.named_parameters():
        parameter.data = case.random(key, parameter.data, parameter.dtype)
    source, path = tmp_path / "source", tmp_path / "path"
    for one in (source, path):
        model.save_pretrained(one, save_original_format=not fused)
    name = "model.layers.1.mlp.experts.gate_up_proj" if fused else "model.layers.1.self_attn.o_proj.weight"
    models.edit(path, name, models.tensors(path)[name].transpose(-1, -2).contiguous())
    findings = [one for one in verify(path, source=source).findings if one.code != "CK720"]  # it has no tokenizer
    assert {one.code for one in findings} == {"CK202"}
    for finding in findings:
        assert f"{name}" in finding.actual


def test_a_changed_sign_of_zero_is_a_difference(fresh: PathOf, only: OnlyFinding) -> None:
    path, name = fresh("qwen2-tied"), "model.layers.0.mlp.up_proj.weight"
    tensor = models.tensors(path)[name]
    tensor[0, 0] = 0.0
    models.edit(path, name, tensor)
    source = shutil.copytree(path, path.with_name("source"))
    tensor[0, 0] = -0.0
    models.edit(path, name, tensor)
    assert only(verify(path, source=source)).code == "CK202"


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("5.mlp.experts.3.gate_proj", "5.mlp.experts.3.up_proj", "gate_proj and up_proj are exchanged"),
        ("5.mlp.experts.3.up_proj", "5.mlp.experts.11.up_proj", "experts 3 and 11 are exchanged"),
        ("10.self_attn.k_proj", "10.self_attn.v_proj", "k_proj and v_proj are exchanged"),
        ("1.mlp.down_proj", "0.mlp.down_proj", "layers 0 and 1 are exchanged"),
    ],
)
def test_swapped_tensors_are_one_finding_that_says_so(
    first: str, second: str, said: str, converted: PathOf, fresh: PathOf, only: OnlyFinding
) -> None:
    path = fresh("glm4_moe")
    first, second = f"model.layers.{first}.weight", f"model.layers.{second}.weight"
    found = models.tensors(path)
    for name, other in ((first, second), (second, first)):
        models.edit(path, name, found[other])
    finding = only(verify(path, source=converted("glm4_moe")))
    assert (finding.code, finding.actual, finding.count) == ("CK202", said, 2)
    assert finding.names == {first, second}


@pytest.mark.parametrize(
    ("value", "code", "said", "seen"), [(math.nan, "CK204", "NaN", "NaN"), (0.0, "CK205", "zero", "differ")]
)
def test_a_router_lost_on_the_way_is_one_error_with_its_difference_under_it(
    value: float, code: str, said: str, seen: str, releases: PathOf, fresh: PathOf
) -> None:
    path, name = fresh("glm4_moe"), "model.layers.4.mlp.gate.weight"
    models.edit(path, name, torch.full_like(models.tensors(path)[name], value))
    report = verify(path, source=releases("glm4_moe"))
    found = {finding.code: finding for finding in report.findings}
    assert set(found) == {"CK202", code}
    assert (found[code].tensor, found[code].actual, found[code].cause) == (name, text_with(said), None)
    assert found["CK202"].cause == f"{code}-1"
    assert seen in found["CK202"].actual
    assert (report.errors, report.verdict) == (1, "FAILED with 1 error")
    assert headline(report) == f"Router of layer 4: {found[code].actual}."


def test_another_model_is_one_finding(releases: PathOf, fresh: PathOf, only: OnlyFinding) -> None:
    path = fresh("glm4_moe")
    found = models.tensors(path)
    save_file({name: tensor * 2 + 0.125 for name, tensor in found.items()}, path / "model.safetensors")
    for shard in path.glob("model-*"):
        shard.unlink()
    (path / "model.safetensors.index.json").unlink()
    finding = only(verify(path, source=releases("glm4_moe")))
    assert finding.actual.startswith(f"{len(found)} of {len(found)} tensors differ: another model")
    assert finding.count == len(found)


def test_a_layer_stored_twice_is_one_error(releases: PathOf, fresh: PathOf) -> None:
    path = fresh("qwen2-tied")
    for name, tensor in models.tensors(path).items():
        if name.startswith("model.layers.3."):
            models.edit(path, name.replace(".3.", ".4.", 1), tensor)
    report = verify(path, source=releases("qwen2-tied"))
    assert [(one.code, one.actual, one.cause) for one in report.findings] == [
        ("CK202", text_with("4 values 3"), None),
        ("CK206", text_with("3 4 bytes"), "CK202-1"),
    ]
    assert headline(report) == text_with("4 values 3")


def test_the_hf_side_gives_the_config_where_megatron_has_none(releases: PathOf, fresh_megatron: PathOf) -> None:
    path = fresh_megatron("qwen2-tied")
    shutil.rmtree(path / "hf")
    release = releases("qwen2-tied")
    for checkpoint, source in ((path, release), (release, path), (path / "release", release)):
        report = verify(checkpoint, source=source)
        assert report.findings == []
        assert compared(report, "CK202") == 146
        assert {check.status for check in report.checks} == {"passed"}


def test_source_with_other_tensors_is_found(releases: PathOf) -> None:
    pair = [releases("qwen2-untied"), releases("qwen2-tied")]
    for path, source in (pair, pair[::-1]):
        found = verify(path, source=source).findings
        assert ("CK202", "lm_head.weight") in [(finding.code, finding.tensor) for finding in found]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_cast_that_is_never_legal(
    dtype: torch.dtype, releases: PathOf, fresh: PathOf, alone: Callable[..., Any]
) -> None:
    path, name = fresh("qwen2-tied"), "model.layers.3.mlp.up_proj.weight"
    models.edit(path, name, models.tensors(path)[name].to(dtype))
    _, (finding,) = alone("CK203", path, source_path=releases("qwen2-tied"))
    assert (finding.tensor, finding.severity) == (name, "error")
    assert (finding.expected, finding.actual) == ("bfloat16", str(dtype).removeprefix("torch."))


def test_values_that_fp32_state_lost_are_counted(releases: PathOf, fresh: PathOf) -> None:
    path, name = fresh("glm4_moe"), BIAS.format(2)
    # bfloat16 near 7: values are 1/32 apart.
    kept = {round(value * 32) for value in models.tensors(path)[name].tolist()}
    stored = edits.names(path, BIAS.rpartition(".")[2])
    edits.replace(path, {one: edits.tensor(path, one).bfloat16() for one in stored})
    (found,) = [one for one in verify(path, source=releases("glm4_moe")).findings if one.code == "CK203"]
    assert (found.count, found.actual) == (10, f"bfloat16, 12 distinct values became {len(kept)} in {name}")


@pytest.mark.parametrize(
    ("pattern", "value", "severity"),
    [
        ("model.layers.{}.self_attn.q_proj.bias", 0.0, None),
        ("model.layers.{}.self_attn.q_proj.bias", 0.5, "warning"),
        (BIAS, 0.0, "warning"),
        ("model.layers.{}.input_layernorm.weight", 0.0, "error"),
        ("model.layers.{}.input_layernorm.weight", 1.0, None),  # as training starts
        ("model.layers.{}.mlp.gate.weight", 0.0, "error"),
    ],
)
def test_constant_in_all_layers_of_a_trained_model(
    pattern: str, value: float, severity: str | None, fresh: PathOf
) -> None:
    """Zeros are how biases begin, and training moves a router's selection bias."""
    path = fresh("glm4_moe")
    found = models.tensors(path)
    for name in filter(found.__contains__, map(pattern.format, range(12))):
        models.edit(path, name, torch.full_like(found[name], value))
    report = verify(path)
    assert [(one.code, one.severity) for one in report.findings] == ([("CK205", severity)] if severity else [])


@pytest.mark.parametrize(
    ("name", "value", "severity"),
    [
        ("model.layers.4.mlp.gate.weight", 0.0, "error"),
        ("model.layers.4.mlp.experts.11.up_proj.weight", 0.5, "error"),
        ("model.embed_tokens.weight", 0.0, "error"),
        ("model.layers.4.input_layernorm.weight", 0.0, "error"),
        ("model.layers.4.self_attn.q_proj.bias", 0.0, None),
        (BIAS.format(4), 0.0, None),
    ],
)
def test_lost_tensor_of_a_model_before_its_training(
    name: str, value: float, severity: str | None, tmp_path: Path
) -> None:
    fresh = replace(HF_CASES["glm4_moe"], value=lambda key, tensor, dtype: tensor)
    case.save("glm4_moe", fresh, tmp_path, torch.bfloat16)
    models.edit(tmp_path, name, torch.full_like(models.tensors(tmp_path)[name], value))
    found = [(one.code, one.tensor, one.severity) for one in verify(tmp_path).findings]
    assert found == ([("CK205", name, severity)] if severity else [])


@pytest.mark.parametrize(
    ("ending", "value", "sound"),
    [("_max", math.inf, True), ("_max", -math.inf, False), ("_min", -math.inf, True), ("_scale", math.inf, False)],
)
def test_bound_that_clips_nothing_is_infinite(ending: str, value: float, sound: bool, fresh: PathOf) -> None:
    path = fresh("qwen2-tied")
    save_file({f"model.audio_tower.input{ending}": torch.tensor(value)}, path / "model-00099-of-00099.safetensors")
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][f"model.audio_tower.input{ending}"] = "model-00099-of-00099.safetensors"
    index.write_text(json.dumps(content))
    result = values.finite(Subject(path), Tally())
    assert [one.code for one in result] == ([] if sound else ["CK204"])


def test_rows_of_zeros_are_a_warning_except_in_the_vocabulary(fresh: PathOf, only: OnlyFinding) -> None:
    path = fresh("glm4_moe")
    for name in ("model.layers.8.self_attn.o_proj.weight", "model.embed_tokens.weight"):
        tensor = models.tensors(path)[name]
        tensor[64:] = 0
        models.edit(path, name, tensor)
    finding = only(verify(path))
    assert (finding.code, finding.tensor) == ("CK205", "model.layers.8.self_attn.o_proj.weight")
    assert (finding.severity, finding.actual) == ("warning", text_with("64 128 rows"))


def test_zeros_among_other_values_are_normal(fresh: PathOf) -> None:
    path, name = fresh("qwen2-tied"), "model.layers.8.self_attn.o_proj.weight"
    models.edit(path, name, models.tensors(path)[name].relu())
    assert verify(path).findings == []


MERGE = """
merge_method: {method}
slices:
  - sources: [{{model: org/base, layer_range: [0, 5]}}]
  - sources: [{{model: org/{second}, layer_range: [4, {last}]}}]
"""


def repeated(path: Path, first: int) -> Path:
    """Gives two layers the same output projection."""
    here, there = (f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (first, first + 1))
    models.edit(path, there, models.tensors(path)[here])
    return path


def test_layers_that_a_merge_repeated_are_no_fault_and_others_are(fresh: PathOf) -> None:
    path, text = repeated(fresh("glm4_moe"), 4), MERGE.format(method="passthrough", second="base", last=11)
    (path / "mergekit_config.yml").write_text(text)
    report = verify(path)
    assert (report.status, report.findings) == ("passed", [])
    assert report.facts["notes"][0] == text_with("{4..5} mergekit_config.yml")
    for other in (
        MERGE.format(method="passthrough", second="other", last=11),
        MERGE.format(method="linear", second="base", last=11),
        MERGE.format(method="passthrough", second="base", last=4_000_000_000),
        "slices: [",
        "merge_method: passthrough",
    ):
        (path / "mergekit_config.yml").write_text(other)
        (finding,) = verify(path).findings
        assert (finding.code, finding.severity) == ("CK206", "error")
    (path / "mergekit_config.yml").write_text(text)
    (finding,) = verify(repeated(path, 7)).findings
    assert finding.actual == text_with("7 8 bytes")


def test_layers_that_the_source_repeats_too_are_a_warning(releases: PathOf, fresh: PathOf) -> None:
    path = repeated(fresh("glm4_moe"), 4)
    (finding,) = verify(path, source=path).findings
    assert (finding.code, finding.severity) == ("CK206", "warning")
    assert finding.actual == text_with("4 5 bytes")
    assert {one.severity for one in verify(path, source=releases("glm4_moe")).findings} == {"error"}


def test_exchanged_layers_of_packed_weights_are_one_error(releases: PathOf, tmp_path: Path) -> None:
    """Plain tensors show whose values they are; packed ones only that they are far off, for the same reason."""
    path = tmp_path / "int4"
    quantize(releases("glm4_moe"), path, QuantScheme(32, "qmax7"))
    found = models.tensors(path)
    other = {"4": "6", "6": "4"}
    swapped = {re.sub(r"(?<=layers\.)[46](?=\.)", lambda it: other[it[0]], name): one for name, one in found.items()}
    for shard in path.glob("*.safetensors*"):
        shard.unlink()
    save_file(swapped, path / "model.safetensors")
    report = verify(path, source=releases("glm4_moe"))
    first, *others = report.findings
    assert (first.code, first.actual, first.cause) == ("CK202", "layers 4 and 6 are exchanged", None)
    assert len(others) > 5
    assert {(one.code, one.cause) for one in others} == {("CK305", "CK202-1")}
    assert report.errors == 1
    assert headline(report) == "Layers 4 and 6 are exchanged."
    assert {cell["failed"] > 0 for cell in report.heat["4"].values()} == {True}


# CK207 to CK210: numbers that are possible one by one and cannot be what was trained.


UP = "model.layers.3.mlp.up_proj.weight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_extremes_are_those_of_the_tensor(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 400_000)
    tensor[0, 17], tensor[2, 399_999] = -3.0, 4.0
    found = extremes(tensor.to(dtype))
    assert (found.low, found.high, found.rows, found.zero_rows, found.finite) == (-3.0, 4.0, 3, 1, True)
    assert found.rms == pytest.approx(math.sqrt(25 / 1_200_000), rel=0.01)


@pytest.mark.parametrize("value", [1e-25, 1e25])
def test_sizes_whose_squares_float32_cannot_hold(value: float) -> None:
    assert extremes(torch.full((4, 8), value, dtype=torch.bfloat16)).rms == pytest.approx(value, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.uint8, torch.int32])
def test_extremes_of_non_float_dtypes_have_no_rms(dtype: torch.dtype) -> None:
    found = extremes(torch.tensor([[0, 0], [1, 0]]).to(dtype))
    assert (found.low, found.high, found.zero_rows, found.rms) == (0, 1, 1, 0)


@pytest.mark.parametrize(("value", "denormal"), [(2.0**-127, True), (2.0**-126, False), (0.0, False)])
def test_where_denormal_numbers_begin(value: float, denormal: bool) -> None:
    assert extremes(torch.tensor([0.0, -value])).denormal is denormal


def test_bytes_are_compared_and_not_numbers() -> None:
    nan = torch.tensor([math.nan, 0.0])
    assert same_bytes(nan, nan.clone())
    assert not same_bytes(nan, torch.tensor([math.nan, -0.0]))
    assert not same_bytes(torch.zeros(2, dtype=torch.int32), torch.zeros(2))
    assert not same_bytes(torch.zeros(2, 3), torch.zeros(3, 2))
    assert same_bytes(torch.zeros(0), torch.zeros(0))


def grow(path: Path, factor: float) -> None:
    tensor = models.tensors(path)[UP]
    models.edit(path, UP, (tensor.float() * factor).to(tensor.dtype))


@pytest.mark.parametrize("factor", [16, 1 / 16])
def test_layers_that_training_made_larger_or_smaller(factor: float, fresh: PathOf, passes: Callable[..., None]) -> None:
    path = fresh("qwen2-tied")
    grow(path, factor)
    passes("CK208", path, 146)


def test_a_matrix_of_another_size_in_the_source_too_is_a_warning(
    releases: PathOf, fresh: PathOf, alone: RunAlone
) -> None:
    path = fresh("qwen2-tied")
    grow(path, 200)
    _, (finding,) = alone("CK208", path, source_path=path)
    assert finding.severity == "warning"
    _, (finding,) = alone("CK208", path, source_path=releases("qwen2-tied"))
    assert finding.severity == "error"


def sized(path: Path, size: float) -> None:
    """Every matrix of layers at this root mean square."""
    for name, found in models.tensors(path).items():
        if name.endswith("_proj.weight"):
            models.edit(path, name, (torch.randn(found.shape) * size).to(found.dtype))


def test_matrices_that_are_all_larger_than_any_that_was_trained(fresh: PathOf, alone: RunAlone) -> None:
    """As codes of FP8 without their scales: each is as large as its siblings. A tenth of that is left alone."""
    path = fresh("qwen2-tied")
    sized(path, 100.0)
    _, (finding,) = alone("CK208", path)
    assert (finding.severity, finding.count) == ("error", 7 * 12)
    assert "of at most 64" in finding.expected
    _, (finding,) = alone("CK208", path, source_path=path)
    assert finding.severity == "warning"
    sized(path, 10.0)
    assert alone("CK208", path)[1] == []


def test_float32_biases_that_were_bfloat16_once(releases: PathOf, fresh: PathOf, alone: RunAlone) -> None:
    path = fresh("glm4_moe")
    found = models.tensors(path)
    models.edit(path, BIAS.format(4), torch.zeros(12))  # which are not coarse
    assert alone("CK210", path)[1] == []
    for layer in range(2, 12):
        models.edit(path, BIAS.format(layer), found[BIAS.format(layer)].bfloat16().float())
    _, (finding,) = alone("CK210", path)
    assert (finding.tensor, finding.count, finding.severity) == (BIAS.format("{2..11}"), 10, "warning")
    assert alone("CK210", path, source_path=path)[1] == []
    assert len(alone("CK210", path, source_path=releases("glm4_moe"))[1]) == 1


def padded(source: Path, path: Path, rows: Tensor, iteration: str = "release") -> Path:
    """A copy of a Megatron checkpoint with these rows below the embedding."""
    before = TorchDistCheckpoint(source / "release")
    tensors = before.read(list(before.specs))
    name = "embedding.word_embeddings.weight"
    tensors[name] = torch.cat([tensors[name], rows])
    checkpoint = models.InMemory(before.config, tensors)
    shutil.copytree(source, path, ignore=shutil.ignore_patterns("release"))
    copy(checkpoint, FilesWriter(path, TorchDistFiles(checkpoint.specs, dict(before.args))), "padding")
    return (path / "release").rename(path / iteration)


@pytest.mark.parametrize(("iteration", "severity"), [("release", "error"), ("iter_0000010", "warning")])
def test_vocabulary_padding_that_is_not_zero_is_found(
    iteration: str, severity: str, converted: PathOf, tmp_path: Path, alone: RunAlone
) -> None:
    rows = torch.zeros(32, 128, dtype=torch.bfloat16)
    rows[5:8, 3] = 0.02
    path = padded(converted("qwen2-tied"), tmp_path / "padded", rows, iteration)
    _, (finding,) = alone("CK209", path)
    assert (finding.tensor, finding.severity) == ("embedding.word_embeddings.weight", severity)
    assert finding.actual == text_with("3 32 rows 352")


def test_vocabulary_padding_of_zeros_is_silent(converted: PathOf, releases: PathOf, tmp_path: Path) -> None:
    path = padded(converted("qwen2-tied"), tmp_path / "padded", torch.zeros(32, 128, dtype=torch.bfloat16))
    report = verify(path, source=releases("qwen2-tied"))
    assert [finding for finding in report.findings if finding.code.startswith("CK2")] == []
    assert {check.code: check.status for check in report.checks}["CK209"] == "passed"
