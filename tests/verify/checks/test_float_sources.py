"""`verify --source` of weights in FP8 and four bits: against plain weights, against the same format, and another."""

import shutil
from dataclasses import replace as with_

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from mutations.edits import edit_json, names, replace, tensor
from safetensors.torch import load_file, save_file
from support import floats, quantized
from support.messages import text_with
from support.nightly import daily

import ckptkit
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.quant.formats.dequantize import dequantized
from ckptkit.verify.run import verify

# The format of the source, and what is made of its weights.
PAIRS = (
    ("mxfp4-quark", "fp8-ue8m0"),
    ("mxfp4-compressed", "fp8"),
    ("mxfp4-compressed", "mxfp8"),
    ("fp8", "mxfp8"),
    ("fp8", "fp8-channel"),
    ("fp8", "nvfp4-modelopt"),
    ("fp8", "mxfp4-quark"),
    ("fp8-ue8m0", "fp8"),
    ("nvfp4-modelopt", "nvfp4-compressed"),
    ("nvfp4-compressed", "fp8"),
)
EXPERT, OTHER = (f"model.layers.5.mlp.experts.{number}.up_proj.weight" for number in (7, 3))
OUTPUT = "model.layers.5.self_attn.o_proj.weight"


def linear(name):
    return name.endswith("_proj.weight")


@pytest.fixture(scope="module")
def fp8(releases, tmp_path_factory):
    return floats.write(releases("qwen3_moe"), tmp_path_factory.mktemp("fp8") / "blocks", floats.SPELLINGS["fp8"])


def plain_copy(path, release, target):
    view = dequantized(HfCheckpoint(path), str(path))
    shutil.copytree(release, target)
    for file in target.glob("*.safetensors"):
        save_file(dict(view.read(list(load_file(file)))), file, metadata={"format": "pt"})
    return target


def per_tensor(weight):
    """The quotient in bfloat16, as dividing by a scalar gives it."""
    scale = weight.float().abs().max() / 448
    codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"": codes, "_scale": scale.reshape(1)}, weight


def compressed_tensors(weight):
    """A scale a row by compressed-tensors' own functions, which round scales and quotients to bfloat16."""
    args = QuantizationArgs(num_bits=8, type="float", strategy="channel")
    scale, zero_point = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), args)
    return {"": quantize(weight, scale, zero_point, args, torch.float8_e4m3fn), "_scale": scale}, weight


TENSOR = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
CHANNEL = quantized.compressed_config("float-quantized", num_bits=8, type="float", strategy="channel")


@pytest.mark.parametrize(("quantizer", "content"), [(per_tensor, TENSOR), (compressed_tensors, CHANNEL)])
def test_fp8_of_quantizers_that_round_in_bfloat16_has_no_finding(quantizer, content, releases, tmp_path, passes):
    release, path = releases("qwen2-untied"), tmp_path / "fp8"
    quantized.write(release, path, linear, quantizer, lambda config: config | {"quantization_config": content})
    for code in ("CK202", "CK203", "CK305"):
        passes(code, path, source_path=release)


def test_fp8_against_fused_experts_and_against_megatron_has_no_finding(fp8, releases, converted):
    for source in (releases("qwen3_moe", fused=True), converted("qwen3_moe")):
        report = verify(fp8, source=source)
        assert (report.findings, report.status) == ([], "passed")
        assert {check.code: check.tensors_compared for check in report.checks}["CK305"] == 12 * (4 + 12 * 3)


def test_fp8_and_what_it_dequantizes_to_are_compared_bit_for_bit(fp8, releases, tmp_path, copy_of):
    for path in (copy_of(fp8), plain_copy(fp8, releases("qwen3_moe"), tmp_path / "plain")):
        assert verify(path, source=fp8).findings == []
        stored = tensor(path, EXPERT)
        stored.view(torch.uint8)[0, 0] ^= 1
        replace(path, {EXPERT: stored})
        assert {(one.code, one.tensor) for one in verify(path, source=fp8).findings} == {("CK202", EXPERT)}


def test_unknown_fp8_is_inconclusive_and_not_failed(fp8, copy_of, releases):
    path = copy_of(fp8)
    edit_json(path / "config.json", lambda config: config["quantization_config"].update(scale_fmt="of tomorrow"))
    report = verify(path, source=releases("qwen3_moe"))
    assert {finding.code for finding in report.findings} & {"CK202", "CK203", "CK305"} == set()
    assert report.status == "inconclusive"


@pytest.mark.parametrize("formats", daily(PAIRS, (PAIRS[0], PAIRS[3])), ids="-to-".join)
def test_weights_of_another_format_than_the_sources(formats, releases, tmp_path, alone):
    source = floats.write(releases("qwen3_moe"), tmp_path / "source", floats.SPELLINGS[formats[0]])
    plain = plain_copy(source, releases("qwen3_moe"), tmp_path / "plain")
    made = floats.write(plain, tmp_path / "made", floats.SPELLINGS[formats[1]])
    report = verify(made, source=source)
    assert (report.findings, report.status) == ([], "passed")
    assert {check.code: check for check in report.checks}["CK305"].tensors_compared > 400
    ending = "_packed" if formats[1] == "nvfp4-compressed" else ""
    replace(made, {EXPERT + ending: tensor(made, OTHER + ending)})
    _, findings = alone("CK305", made, source_path=source)
    assert [(finding.tensor, finding.severity) for finding in findings] == [(EXPERT, "error")]


def mxfp4_and_fp8(module, weight):
    """Experts in MXFP4 as DeepSeek-V4 stores them, beside FP8."""
    if ".experts." not in module:
        return floats.deepseek(module, weight)
    stored = floats.mxfp4("weight")(module, weight)
    codes, scale = stored[f"{module}.weight"], stored[f"{module}.weight_scale"]
    return {f"{module}.weight": codes.view(torch.int8), f"{module}.scale": scale.view(torch.float8_e8m0fnu)}


def test_fp8_that_is_kept_beside_experts_of_another_format_is_compared_bit_for_bit(releases, tmp_path, alone):
    release, spelling = releases("qwen3_moe"), with_(floats.SPELLINGS["fp8"], columns=32)
    mixed = with_(spelling, store=mxfp4_and_fp8, config=spelling.config | {"expert_dtype": "fp4"})
    source = floats.write(release, tmp_path / "source", mixed)
    made = floats.write(plain_copy(source, release, tmp_path / "plain"), tmp_path / "made", spelling)
    replace(made, {name: tensor(source, name) for name in names(source, "self_attn")})
    assert [str(finding) for finding in verify(made, source=source).findings] == []
    codes = tensor(made, OUTPUT)
    codes.view(torch.uint8)[0, 0] ^= 1
    replace(made, {OUTPUT: codes})
    assert [finding.tensor for finding in alone("CK202", made, source_path=source)[1]] == [OUTPUT]
    assert alone("CK305", made, source_path=source)[1] == []


def test_weights_that_were_dequantized_beside_others_are_compared_with_their_source(fp8, releases, tmp_path, alone):
    plain = plain_copy(fp8, releases("qwen3_moe"), tmp_path / "plain")
    made = floats.write(plain, tmp_path / "made", floats.SPELLINGS["fp8"], lambda name: ".experts." in name)
    assert [str(finding) for finding in verify(made, source=fp8).findings] == []
    wrong = tensor(made, OUTPUT)
    wrong[0, 0] += 1
    replace(made, {OUTPUT: wrong})
    assert [finding.tensor for finding in alone("CK202", made, source_path=fp8)[1]] == [OUTPUT]


@pytest.mark.parametrize("exponent", [-14, -16])
def test_mxfp4_that_fp8_cannot_hold_is_found(exponent, releases, tmp_path, alone):
    """One group of a block has 4.0, and another 0.5 times this power of two."""
    release = releases("qwen3_moe")
    source = floats.write(release, tmp_path / "source", floats.SPELLINGS["mxfp4-quark"])
    codes, scale = tensor(source, EXPERT), tensor(source, f"{EXPERT}_scale")
    codes[:32, :16], scale[:32, 0] = 0, 127
    codes[0, 0], codes[1, 0], scale[1, 0] = 6, 1, 127 + exponent
    replace(source, {EXPERT: codes, f"{EXPERT}_scale": scale})
    plain = plain_copy(source, release, tmp_path / "plain")
    made = floats.write(plain, tmp_path / "made", floats.SPELLINGS["fp8-ue8m0"])
    result, findings = alone("CK305", made, source_path=source)
    assert (result and result.status) == "passed"
    found = [(one.tensor, one.severity, one.actual) for one in findings]
    actual = text_with(f"1 of 1 of them to 0; {EXPERT}[1, 0] 7.62939e-06 0")
    assert found == ([] if exponent == -14 else [(EXPERT, "warning", actual)])


SCHEMES = {
    "w4a16": ckptkit.int4_scheme(group_size=32),
    "fp8-channel": ckptkit.FloatScheme("fp8-channel"),
    "mxfp8": ckptkit.FloatScheme("mxfp8"),
}


@pytest.mark.parametrize("spelling", daily(("fp8", "mxfp4-compressed"), ("fp8",)))
@pytest.mark.parametrize("scheme", daily(SCHEMES, ("w4a16",)))
def test_what_quantize_makes_of_a_quantized_release_has_no_finding(scheme, spelling, releases, tmp_path):
    source = floats.write(releases("qwen3_moe"), tmp_path / "source", floats.SPELLINGS[spelling])
    ckptkit.quantize(source, tmp_path / "made", SCHEMES[scheme])
    report = verify(tmp_path / "made", source=source)
    assert [str(finding) for finding in report.findings if finding.severity == "error"] == []
    assert report.status == "passed"
    assert {check.code: check for check in report.checks}["CK305"].tensors_compared
