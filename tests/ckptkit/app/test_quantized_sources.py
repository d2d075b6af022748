"""Quantized releases as sources and references of a conversion: what is said about them, and what is refused."""

import json

import pytest
from click.testing import CliRunner
from mutations.edits import edit_config
from support import models, quantized
from support.messages import refusal, text_with

from ckptkit.app.api import convert, inspect, quantize
from ckptkit.app.cli import cli
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.side_files import write_config
from ckptkit.quant.formats.scheme import QuantScheme, read_scheme
from ckptkit.quant.schemes.floats import FloatScheme
from ckptkit.verify.run import verify

WORDS = "FP8 float8_e4m3fn 100 60"


@pytest.fixture(scope="module")
def fp8(releases, tmp_path_factory):
    target = tmp_path_factory.mktemp("fp8") / "release"
    config = {"quant_method": "fp8", "weight_block_size": [100, 60]}
    quantized.write(
        releases("qwen2-tied"),
        target,
        lambda name: "_proj.weight" in name,
        quantized.fp8_blocks(100, 60),
        lambda release: release | {"quantization_config": config},
    )
    return target


def run(*arguments):
    return str(CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False).stdout)


def test_the_command_line_says_what_it_dequantizes(fp8, tmp_path):
    assert run("inspect", fp8) == text_with(f"quantization {WORDS} 84 ckptkit convert")
    assert run("convert", fp8, tmp_path / "megatron", "--dry-run") == text_with(f"dequantized {WORDS}")
    assert json.loads(run("convert", fp8, tmp_path / "megatron", "--json"))["dequantized"] == text_with(WORDS)
    assert json.loads(run("convert", tmp_path / "megatron", tmp_path / "back", "--json"))["dequantized"] is None
    assert inspect(tmp_path / "back")["quantization"] is None


def test_from_fp8_to_int4(fp8, tmp_path):
    """Directly and by way of Megatron, as if the plain weights had been quantized."""
    scheme = QuantScheme(32, "qmax7")
    convert(fp8, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "expected", scheme)
    convert(tmp_path / "megatron", tmp_path / "by Megatron", hf=fp8, quantize=scheme)
    assert quantize(fp8, tmp_path / "int4", scheme).dequantized == text_with(WORDS)
    stated = read_scheme(json.loads((tmp_path / "expected/config.json").read_text()))
    for way in ("int4", "by Megatron"):
        assert models.unequal(tmp_path / way, tmp_path / "expected") == []
        assert read_scheme(json.loads((tmp_path / way / "config.json").read_text())) == stated


def test_a_format_that_is_not_known(releases, converted, copy_of, tmp_path):
    source = copy_of(releases("qwen2-tied"))
    edit_config(source, quantization_config={"quant_method": "awq", "bits": 4})
    message = "quantization method 'awq' is not supported"
    assert inspect(source)["quantization"] == text_with(f"config.json {message}")
    jobs = [
        lambda: convert(source, tmp_path / "out"),
        lambda: quantize(source, tmp_path / "out", QuantScheme(32, "qmax7")),
        lambda: convert(converted("qwen2-tied"), tmp_path / "out", hf=source),
        lambda: verify(converted("qwen2-tied"), source=source),
    ]
    for job in jobs:
        assert refusal(message, job).hint == text_with("fp8, mxfp8, mxfp4, modelopt, quark compressed-tensors")
    assert [path.name for path in tmp_path.iterdir()] == ["qwen2-tied"]


def test_a_config_with_a_model_inside(tmp_path):
    """The dtype is corrected where it is stated, and `quantization_config` goes wherever it stands."""
    text = {"hidden_size": 4, "torch_dtype": "float8_e4m3fn", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "text_config": text}))
    write_config(tmp_path, {"model_type": "x"}, {"a": TensorSpec("a", (2,), "bfloat16")})
    expected = {"model_type": "x", "text_config": {"hidden_size": 4, "torch_dtype": "bfloat16"}}
    assert json.loads((tmp_path / "config.json").read_text()) == expected


def test_gpt_oss_in_mxfp4_becomes_bf16_exactly_and_no_other_format(releases, tmp_path):
    meant = quantized.write(  # as OpenAI does; returns what it means, by a formula of its own
        releases("gpt_oss"),
        tmp_path / "mxfp4",
        lambda name: name.endswith(("experts.gate_up_proj", "experts.down_proj")),
        quantized.mxfp4,
        lambda config: config | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}},
    )
    printed = run("quantize", tmp_path / "mxfp4", tmp_path / "bf16", "--scheme", "none")
    assert printed == text_with("MXFP4 4-bit 32")
    assert models.unequal(tmp_path / "bf16", meant) == []
    assert "quantization_config" not in json.loads((tmp_path / "bf16/config.json").read_text())
    command = json.loads((tmp_path / "bf16/ckptkit.json").read_text())["command"]
    assert command[-2:] == ["--scheme", "none"]
    report = verify(tmp_path / "bf16", source=tmp_path / "mxfp4")
    assert report.findings == []
    assert {check.code: check.tensors_compared for check in report.checks}["CK202"] >= len(meant)
    for scheme in (FloatScheme("fp8-block", "deepgemm"), FloatScheme("mxfp8"), QuantScheme(32, "qmax7")):
        error = refusal("gpt_oss", quantize, tmp_path / "mxfp4", tmp_path / "other", scheme)
        assert "--scheme none" in str(error.hint)
        assert "2880 features" in str(error.hint)


def test_nothing_to_dequantize_is_refused(releases, fp8, tmp_path):
    refusal("dequantize", quantize, releases("qwen2-tied"), tmp_path / "out", None)
    for words in (["--group-size", "32"], ["--rounding", "slime"], ["--ignore", "lm_head"], ["--tp", "2"]):
        done = CliRunner().invoke(cli, ["quantize", str(fp8), str(tmp_path / "out"), "--scheme", "none", *words])
        assert (done.exit_code, words[0] in done.output) == (2, True)
    assert list(tmp_path.iterdir()) == []
