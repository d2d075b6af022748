"""`verify`, `lint` and `inspect` find nothing in what `quantize` makes of every family in every float scheme."""

import shutil
from dataclasses import dataclass

import pytest
import torch
from families import HF_CASES, case
from families.table import config_of
from safetensors import safe_open
from support.messages import text_with
from support.nightly import daily
from support.sglang_sizes import widened

from ckptkit.app.api import inspect, quantize
from ckptkit.converters.registry import FAMILIES
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.engines.registry import engine_class
from ckptkit.quant.ignore.lint import lint
from ckptkit.quant.schemes.floats import FloatScheme
from ckptkit.quant.schemes.registry import NAMES
from ckptkit.verify.run import verify


@dataclass(frozen=True)
class Written:
    scheme: FloatScheme
    readers: tuple[str, ...]
    engines: tuple[str, ...] = ("sglang",)


COMPRESSED = "compressed-tensors"
WRITTEN = {
    "fp8-block": Written(FloatScheme("fp8-block"), ("sglang", "vllm", "transformers")),
    "fp8-block-ct": Written(FloatScheme("fp8-block", COMPRESSED), ("sglang", "vllm")),
    "fp8-channel": Written(FloatScheme("fp8-channel"), ("sglang", "vllm")),
    "mxfp8": Written(FloatScheme("mxfp8"), ("sglang",)),
    "mxfp8-vllm": Written(FloatScheme("mxfp8"), ("vllm",), ("vllm",)),
    "mxfp4": Written(FloatScheme("mxfp4"), ("vllm",), ("vllm",)),
    "nvfp4": Written(FloatScheme("nvfp4"), ("sglang", "vllm")),
    "nvfp4-ct": Written(FloatScheme("nvfp4", COMPRESSED), ("vllm",), ("vllm",)),
}
# gpt-oss's experts are one tensor a layer, which no reader of these schemes knows.
REFUSED = dict.fromkeys(("gpt_oss", "gpt_oss-v4"), "experts")
REFUSED |= {
    model: "Linear layers"
    for model, one in HF_CASES.items()
    if FAMILIES[config_of(one)["model_type"]].release is None and model not in REFUSED
}
# Engines' classes of these read no other format than FP8 in blocks.
FP8_ALONE = [model for model, one in HF_CASES.items() if engine_class("sglang", config_of(one)).fp8_only]
PAIRS = [(model, name) for model in HF_CASES for name in WRITTEN]
DAILY = (
    *(("step3p5", "mxfp8"), ("mimo", "fp8-block")),
    *(("qwen2-untied", "mxfp4"), ("gpt_oss", "fp8-block")),
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """`plain(model)`: the release of a test model; the one before it is deleted."""
    root = tmp_path_factory.mktemp("plain")

    def find(model):
        if not (root / model).exists():
            for other in root.iterdir():
                shutil.rmtree(other)
            case.save(model, widened(model), root / model, torch.bfloat16)
        return root / model

    return find


def codes_in(path):
    found = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            dtypes = {name: tensors.get_slice(name).get_dtype() for name in tensors.offset_keys()}
        found |= {name for name, dtype in dtypes.items() if dtype in ("F8_E4M3", "U8") and "_scale" not in name}
    return found


@pytest.mark.parametrize("case_of", daily(PAIRS, DAILY), ids="-".join)
def test_what_is_written_has_no_finding(case_of, plain, tmp_path):
    model, name = case_of
    written, out = WRITTEN[name], tmp_path / "out"
    refused = "in FP8 blocks" if model in FP8_ALONE and name != "fp8-block" else REFUSED.get(model)
    if model.startswith("step3p") and name.startswith("fp8-block"):  # its sizes are the published ones, made small
        refused = "quantize"
    if refused is not None:
        with pytest.raises(CkptkitError, match=refused):
            quantize(plain(model), out, written.scheme, readers=written.engines)
        return
    quantize(plain(model), out, written.scheme, readers=written.engines)
    quantized = codes_in(out)
    count = len(quantized)
    report = verify(out, source=plain(model), readers=written.readers)
    assert [str(finding) for finding in report.findings] == []
    assert report.status == "passed"
    assert {check.code: check.tensors_compared for check in report.checks}["CK305"] == count > 0
    assert "CK307" not in {check.code for check in report.checks}  # there is nothing to skip
    linted = lint(out, readers=written.readers)
    assert (linted.findings, linted.packed) == ((), count)
    assert inspect(out)["quantization"] == text_with(f"{name.partition('-')[0].upper()} {count} tensors")
    if name != "fp8-block":  # SGLang dequantizes the indexer's key weight from this layout alone
        assert not {one for one in quantized if ".indexer.wk." in one}


def test_every_float_scheme_is_swept():
    assert {"w4a16", *(written.scheme.name for written in WRITTEN.values())} == set(NAMES)
