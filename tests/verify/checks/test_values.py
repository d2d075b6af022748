"""CK2xx: values are compared with a source in any combination of formats, and judged without one."""

import math
import re
import shutil
from dataclasses import replace

import pytest
import torch
from families import HF_CASES, case
from mutations import edits
from safetensors.torch import save_file
from support import models
from support.messages import text_with
from support.other_models import save_small
from transformers import AutoModelForCausalLM

from ckptkit.app.api import quantize
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.formats.torch_dist.writer import TorchDistFiles
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.transfer.copy import copy
from ckptkit.transfer.files import FilesWriter
from ckptkit.verify.evidence.extremes import extremes, same_bytes
from ckptkit.verify.reports.text import headline
from ckptkit.verify.run import verify

BIAS, ROUTER = "model.layers.{}.mlp.gate.e_score_correction_bias", "model.layers.4.mlp.gate.weight"


def compared(report, code):
    return next(check.tensors_compared for check in report.checks if check.code == code)


@pytest.mark.parametrize(
    "pair", ["hf-hf", "hf-megatron", "megatron-hf", "megatron-megatron", "fused-hf", "fused-megatron"]
)
def test_values_of_one_model_in_any_two_formats_are_equal(pair, releases, converted):
    sides = {"hf": releases("glm4_moe"), "megatron": converted("glm4_moe"), "fused": releases("glm4_moe", fused=True)}
    checkpoint, source = (sides[side] for side in pair.split("-"))
    report = verify(checkpoint, source=source)
    assert report.findings == []
    assert compared(report, "CK202") == len(models.tensors(sides["hf"]))


@pytest.mark.parametrize(("by", "words"), [(1.0, "is 1 more than"), (-1.0, "is 1 less than"), (0.5, "elements differ")])
def test_norms_that_another_convention_shifts_are_said_to_be(by, words, releases, fresh, alone):
    """Some classes multiply by w, others by 1 + w; a converter between them moves the numbers by 1."""
    path, name = fresh("qwen2-tied"), "model.layers.3.input_layernorm.weight"
    models.edit(path, name, models.tensors(path)[name] + by)
    _, (finding,) = alone("CK202", path, source_path=releases("qwen2-tied"))
    assert finding.tensor == name
    assert words in finding.actual


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return save_small("starcoder2", tmp_path_factory.mktemp("starcoder2"))


@pytest.mark.parametrize(
    ("kind", "has_other_values"), [("input_layernorm", False), ("mlp.c_fc", False), ("mlp.c_fc", True)]
)
def test_a_renamed_tensor_is_called_that_where_its_values_are_the_sources(kind, has_other_values, other, tmp_path):
    content = {name.replace(kind, f"{kind}_b"): tensor for name, tensor in models.tensors(other).items()}
    if has_other_values:
        content[f"model.layers.1.{kind}_b.weight"] += 1
    path = shutil.copytree(other, tmp_path / "renamed")
    save_file(content, path / "model.safetensors", {"format": "pt"})
    found = {one.tensor: one.actual for one in verify(path, source=other).findings if one.code == "CK202"}
    weight, bias = (f"model.layers.{{0..1}}.{kind}.{leaf}" for leaf in ("weight", "bias"))
    new = weight.replace(kind, f"{kind}_b")
    assert set(found) == ({weight, bias, new} if has_other_values else {weight, bias})
    assert (new.removesuffix(".weight") in found[weight]) is not has_other_values


@pytest.mark.parametrize("fused", [False, True])
def test_square_tensors_that_are_transposed_are_said_to_be(fused, tmp_path):
    """Of a fused tensor of experts the parts are compared, and the whole is named."""
    model = AutoModelForCausalLM.from_pretrained(save_small("qwen3_moe", tmp_path / "small"), num_experts_per_tok=2)
    source, path = tmp_path / "source", tmp_path / "path"
    for side in (source, path):
        model.save_pretrained(side, save_original_format=not fused)
    name = "model.layers.1.mlp.experts.gate_up_proj" if fused else "model.layers.1.self_attn.o_proj.weight"
    models.edit(path, name, models.tensors(path)[name].transpose(-1, -2).contiguous())
    found = [one for one in verify(path, source=source).findings if one.severity == "error"]
    assert {one.code for one in found} == {"CK202"}
    assert all(name in one.actual for one in found)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("5.mlp.experts.3.gate_proj", "5.mlp.experts.3.up_proj", "gate_proj and up_proj are exchanged"),
        ("5.mlp.experts.3.up_proj", "5.mlp.experts.11.up_proj", "experts 3 and 11 are exchanged"),
        ("10.self_attn.k_proj", "10.self_attn.v_proj", "k_proj and v_proj are exchanged"),
        ("1.mlp.down_proj", "0.mlp.down_proj", "layers 0 and 1 are exchanged"),
    ],
)
def test_swapped_tensors_are_one_finding_that_says_so(first, second, said, converted, fresh, only):
    path = fresh("glm4_moe")
    first, second = f"model.layers.{first}.weight", f"model.layers.{second}.weight"
    found = models.tensors(path)
    for name, other in ((first, second), (second, first)):
        models.edit(path, name, found[other])
    finding = only(verify(path, source=converted("glm4_moe")))
    assert (finding.code, finding.actual, finding.count) == ("CK202", said, 2)
    assert finding.names == {first, second}


@pytest.mark.parametrize(("value", "code"), [(math.nan, "CK204"), (0.0, "CK205")])
def test_a_router_lost_on_the_way_is_one_error_with_its_difference_under_it(value, code, releases, fresh):
    path = fresh("glm4_moe")
    models.edit(path, ROUTER, torch.full_like(models.tensors(path)[ROUTER], value))
    report = verify(path, source=releases("glm4_moe"))
    found = {finding.code: finding for finding in report.findings}
    assert set(found) == {"CK202", code}
    assert (found[code].tensor, found[code].cause, found["CK202"].cause) == (ROUTER, None, f"{code}-1")
    assert (report.errors, report.verdict) == (1, "FAILED with 1 error")
    assert headline(report) == f"Router of layer 4: {found[code].actual}."


def test_another_model_is_one_finding(releases, fresh, only):
    path = fresh("glm4_moe")
    found = models.tensors(path)
    edits.replace(path, {name: tensor * 2 + 0.125 for name, tensor in found.items()})
    finding = only(verify(path, source=releases("glm4_moe")))
    assert finding.actual.startswith(f"{len(found)} of {len(found)} tensors differ")
    assert finding.count == len(found)


@pytest.mark.parametrize(
    ("pattern", "layers", "value", "severity"),
    [
        ("model.layers.{}.self_attn.q_proj.bias", range(12), 0.0, None),
        ("model.layers.{}.self_attn.q_proj.bias", range(12), 0.5, "warning"),
        (BIAS, range(2, 12), 0.0, "warning"),
        ("model.layers.{}.input_layernorm.weight", range(12), 0.0, "error"),
        ("model.layers.{}.input_layernorm.weight", range(12), 1.0, None),  # as training starts
        ("model.layers.{}.mlp.gate.weight", range(2, 12), 0.0, "error"),
        # Of a model before its training.
        ("model.layers.{}.mlp.gate.weight", [4], 0.0, "error"),
        ("model.layers.{}.mlp.experts.11.up_proj.weight", [4], 0.5, "error"),
        ("model.layers.{}.self_attn.q_proj.bias", [4], 0.0, None),
        (BIAS, [4], 0.0, None),
    ],
)
def test_constants_in_all_layers_or_in_one_before_training(pattern, layers, value, severity, fresh, tmp_path, alone):
    """Zeros are how biases begin, and training moves a router's selection bias."""
    path = fresh("glm4_moe") if len(layers) > 1 else tmp_path / "untrained"
    if len(layers) == 1:
        untrained = replace(HF_CASES["glm4_moe"], value=lambda key, tensor, dtype: tensor)
        case.save("glm4_moe", untrained, path, torch.bfloat16)
    constant = map(pattern.format, layers)
    edits.replace(path, {name: torch.full_like(edits.tensor(path, name), value) for name in constant})
    assert [one.severity for one in alone("CK205", path)[1]] == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("ending", "value", "codes"),
    [("_max", math.inf, []), ("_max", -math.inf, ["CK204"]), ("_min", -math.inf, []), ("_scale", math.inf, ["CK204"])],
)
def test_bound_that_clips_nothing_is_infinite(ending, value, codes, fresh, alone):
    path = fresh("qwen2-tied")
    edits.replace(path, {f"model.audio_tower.input{ending}": torch.tensor(value)})
    assert [one.code for one in alone("CK204", path)[1]] == codes


def test_rows_of_zeros_are_a_warning_except_in_the_vocabulary(fresh, only):
    path, output = fresh("glm4_moe"), "model.layers.8.self_attn.o_proj.weight"
    models.edit(path, output, models.tensors(path)[output].relu())
    assert verify(path).findings == []  # zeros among other values are normal
    for name in (output, "model.embed_tokens.weight"):
        tensor = models.tensors(path)[name]
        tensor[64:] = 0
        models.edit(path, name, tensor)
    finding = only(verify(path))
    assert (finding.code, finding.tensor, finding.severity) == ("CK205", output, "warning")
    assert finding.actual == text_with("64 128 rows")


MERGE = """
merge_method: {method}
slices:
  - sources: [{{model: org/base, layer_range: [0, 5]}}]
  - sources: [{{model: org/{second}, layer_range: [4, {last}]}}]
"""


def repeated(path, first):
    here, there = (f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (first, first + 1))
    models.edit(path, there, models.tensors(path)[here])
    return path


def test_layers_that_a_merge_repeated_are_no_fault_and_others_are(releases, fresh):
    path, text = repeated(fresh("glm4_moe"), 4), MERGE.format(method="passthrough", second="base", last=11)
    for source, severity in ((path, "warning"), (releases("glm4_moe"), "error")):
        assert {one.severity for one in verify(path, source=source).findings} == {severity}
    (path / "mergekit_config.yml").write_text(text)
    report = verify(path)
    assert (report.status, report.findings) == ("passed", [])
    assert report.facts["notes"][0] == text_with("{4..5} mergekit_config.yml")
    for other in (
        MERGE.format(method="passthrough", second="other", last=11),
        MERGE.format(method="linear", second="base", last=11),
        MERGE.format(method="passthrough", second="base", last=4_000_000_000),
        "slices: [",
    ):
        (path / "mergekit_config.yml").write_text(other)
        (finding,) = verify(path).findings
        assert (finding.code, finding.severity) == ("CK206", "error")
    (path / "mergekit_config.yml").write_text(text)
    (finding,) = verify(repeated(path, 7)).findings
    assert finding.actual == text_with("7 8 bytes")


def test_exchanged_layers_of_packed_weights_are_one_error(releases, tmp_path):
    """Plain tensors show whose values they are; packed ones only that they are far off, for the same reason."""
    path = tmp_path / "int4"
    quantize(releases("glm4_moe"), path, QuantScheme(32, "qmax7"))
    new = {"layers.4.": "layers.6.", "layers.6.": "layers.4."}
    edits.rename(path, lambda name: re.sub(r"layers\.[46]\.", lambda match: new[match[0]], name))
    report = verify(path, source=releases("glm4_moe"))
    first, *others = report.findings
    assert (first.code, first.actual, first.cause) == ("CK202", "layers 4 and 6 are exchanged", None)
    assert len(others) > 5
    assert {(one.code, one.cause) for one in others} == {("CK305", "CK202-1")}
    assert (report.errors, headline(report)) == (1, "Layers 4 and 6 are exchanged.")
    assert {cell["failed"] > 0 for cell in report.heat["4"].values()} == {True}


# CK207 to CK210: numbers that are possible one by one and cannot be what was trained.


UP = "model.layers.3.mlp.up_proj.weight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_extremes_are_those_of_the_tensor(dtype):
    tensor = torch.zeros(3, 400_000)
    tensor[0, 17], tensor[2, 399_999] = -3.0, 4.0
    found = extremes(tensor.to(dtype))
    assert (found.low, found.high, found.rows, found.zero_rows, found.finite) == (-3.0, 4.0, 3, 1, True)
    assert found.rms == pytest.approx(math.sqrt(25 / 1_200_000), rel=0.01)
    for value in (1e-25, 1e25):  # whose squares float32 cannot hold
        assert extremes(torch.full((4, 8), value, dtype=dtype)).rms == pytest.approx(value, rel=0.01)
    for value, denormal in ((2.0**-127, True), (2.0**-126, False), (0.0, False)):
        assert extremes(torch.tensor([0.0, -value])).denormal is denormal


@pytest.mark.parametrize("dtype", [torch.uint64, torch.bool, torch.int32])
def test_extremes_of_non_float_dtypes_have_no_rms(dtype):
    found = extremes(torch.tensor([[0, 0], [1, 0]]).to(dtype))
    assert (found.low, found.high, found.zero_rows, found.rms) == (0, 1, 1, 0)


def test_bytes_are_compared_and_not_numbers():
    nan = torch.tensor([math.nan, 0.0])
    assert same_bytes(nan, nan.clone())
    assert not same_bytes(nan, torch.tensor([math.nan, -0.0]))
    assert not same_bytes(torch.zeros(2, dtype=torch.int32), torch.zeros(2))
    assert not same_bytes(torch.zeros(2, 3), torch.zeros(3, 2))
    assert same_bytes(torch.zeros(0), torch.zeros(0))


def test_matrices_of_another_size_than_their_siblings(releases, fresh, alone):
    """Training makes some 16 times larger or smaller; 200 times is a warning where the source has it too."""
    path, source = fresh("qwen2-tied"), releases("qwen2-tied")
    before = models.tensors(path)[UP].float()
    for factor in (16, 1 / 16):
        models.edit(path, UP, (before * factor).bfloat16())
        assert alone("CK208", path)[1] == []
    models.edit(path, UP, (before * 200).bfloat16())
    for other, severity in ((path, "warning"), (source, "error")):
        (finding,) = alone("CK208", path, source_path=other)[1]
        assert (finding.tensor, finding.severity) == (UP, severity)


def test_matrices_that_are_all_larger_than_any_that_was_trained(fresh, alone):
    """As codes of FP8 without their scales: each is as large as its siblings. A tenth of that is left alone."""
    path = fresh("qwen2-tied")
    shapes = {name: one.shape for name, one in models.tensors(path).items() if name.endswith("_proj.weight")}
    edits.replace(path, {name: (torch.randn(shape) * 100).bfloat16() for name, shape in shapes.items()})
    (finding,) = alone("CK208", path)[1]
    assert (finding.severity, finding.count) == ("error", 7 * 12)
    assert "of at most 64" in finding.expected
    (finding,) = alone("CK208", path, source_path=path)[1]
    assert finding.severity == "warning"
    edits.replace(path, {name: (torch.randn(shape) * 10).bfloat16() for name, shape in shapes.items()})
    assert alone("CK208", path)[1] == []


def padded(source, path, rows, iteration="release"):
    before = TorchDistCheckpoint(source / "release")
    tensors = before.read(list(before.specs))
    name = "embedding.word_embeddings.weight"
    tensors[name] = torch.cat([tensors[name], rows])
    checkpoint = models.InMemory(before.config, tensors)
    shutil.copytree(source, path, ignore=shutil.ignore_patterns("release"))
    copy(checkpoint, FilesWriter(path, TorchDistFiles(checkpoint.specs, dict(before.args))), "padding")
    return (path / "release").rename(path / iteration)


@pytest.mark.parametrize(
    ("value", "iteration", "severity"),
    [(0.02, "release", "error"), (0.02, "iter_0000010", "warning"), (0.0, "release", None)],
)
def test_vocabulary_padding_that_is_not_zero_is_found(value, iteration, severity, converted, releases, tmp_path):
    rows = torch.zeros(32, 128, dtype=torch.bfloat16)
    rows[5:8, 3] = value
    path = padded(converted("qwen2-tied"), tmp_path / "padded", rows, iteration)
    report = verify(path, source=releases("qwen2-tied"))
    assert "CK209" in {check.code for check in report.checks}
    found = [one for one in report.findings if one.code.startswith("CK2")]
    assert [(one.code, one.tensor, one.severity) for one in found] == (
        [("CK209", "embedding.word_embeddings.weight", severity)] if severity else []
    )
    assert all(one.actual == text_with("3 32 rows 352") for one in found)
