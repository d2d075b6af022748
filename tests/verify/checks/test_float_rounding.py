"""CK305 of FP8 and MXFP4 against the plain source: sound quantizers pass, and each planted fault is found by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from mutations.edits import edit_json
from support import models, quantized
from support.fixture_types import CopyOf, PathOf
from torch import Tensor

from ckptkit.verify.core.report import Report
from ckptkit.verify.run import verify

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
EXPERT = "model.layers.5.mlp.experts.7.up_proj.weight"


def linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def fused(name: str) -> bool:
    return name.endswith(("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))


def says(content: dict[str, Any]) -> quantized.Edit:
    return lambda config: config | {"quantization_config": content}


def per_tensor(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The quotient in bfloat16, as dividing by a scalar gives it."""
    scale = weight.float().abs().max() / 448
    codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"": codes, "_scale": scale.reshape(1)}, weight


def slime(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Blocks of 128 x 128, filled up with zeros, all at once in float32."""
    rows, columns = weight.shape
    filled = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128)).float()
    blocks = filled.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-4) / 448
    codes = (blocks / scale).to(torch.float8_e4m3fn).float().flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return {"": codes.to(torch.float8_e4m3fn), "_scale_inv": scale[:, 0, :, 0]}, weight


def compressed_tensors(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A scale a row by compressed-tensors' own functions, which round scales and quotients to bfloat16."""
    args = QuantizationArgs(num_bits=8, type="float", strategy="channel")
    scale, zero_point = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), args)
    return {"": quantize(weight, scale, zero_point, args, torch.float8_e4m3fn), "_scale": scale}, weight


CHANNEL = quantized.compressed_config("float-quantized", num_bits=8, type="float", strategy="channel")
SOUND: dict[str, tuple[quantized.Quantizer, dict[str, Any]]] = {
    "slime": (slime, FP8 | {"weight_block_size": [128, 128]}),
    "DeepSeek": (
        quantized.fp8_blocks(128, 128, torch.float8_e8m0fnu),
        FP8 | {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    ),
    "tensor": (per_tensor, FP8),
    "llm-compressor": (compressed_tensors, CHANNEL),
}


def found(report: Report) -> set[tuple[str, str | None]]:
    return {(finding.code, finding.tensor) for finding in report.findings}


def status(report: Report, code: str) -> str:
    return next(check.status for check in report.checks if check.code == code)


@pytest.fixture(scope="module")
def fp8(releases: PathOf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """qwen3_moe in FP8, in blocks of 16 x 16."""
    path = tmp_path_factory.mktemp("fp8") / "blocks"
    quantized.write(
        releases("qwen3_moe"), path, linear, quantized.fp8_blocks(16, 16), says(FP8 | {"weight_block_size": [16, 16]})
    )
    return path


def test_sound_fp8_against_its_plain_source_passes(releases: PathOf, tmp_path: Path) -> None:
    quantizer, content = SOUND["slime"]
    quantized.write(releases("qwen3_moe"), tmp_path / "fp8", linear, quantizer, says(content))
    report = verify(tmp_path / "fp8", source=releases("qwen3_moe"))
    assert [str(finding) for finding in report.findings] == []
    assert (report.status, report.findings) == ("passed", [])
    checks = {check.code: check for check in report.checks}
    weights = sum(linear(name) for name in models.tensors(releases("qwen3_moe")))
    assert checks["CK305"].tensors_compared == weights > 400
    assert {checks[code].status for code in ("CK202", "CK203", "CK305")} == {"passed"}


@pytest.mark.parametrize("name", list(SOUND)[1:])
def test_sound_fp8_of_other_quantizers_has_no_finding(
    name: str, releases: PathOf, tmp_path: Path, passes: Callable[..., None]
) -> None:
    quantizer, content = SOUND[name]
    quantized.write(releases("qwen2-untied"), tmp_path / "fp8", linear, quantizer, says(content))
    for code in ("CK202", "CK203", "CK305"):
        passes(code, tmp_path / "fp8", source_path=releases("qwen2-untied"))


def test_fp8_against_fused_experts_and_against_megatron_has_no_finding(
    fp8: Path, releases: PathOf, converted: PathOf
) -> None:
    for source in (releases("qwen3_moe", fused=True), converted("qwen3_moe")):
        assert [str(finding) for finding in verify(fp8, source=source).findings] == []


def test_sound_mxfp4_against_its_plain_source_has_no_finding(releases: PathOf, tmp_path: Path) -> None:
    edit = says({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    quantized.write(releases("gpt_oss"), tmp_path / "mxfp4", fused, quantized.mxfp4, edit)
    report = verify(tmp_path / "mxfp4", source=releases("gpt_oss"))
    assert [str(finding) for finding in report.findings] == []
    assert status(report, "CK305") == "passed"
    name = "model.layers.5.mlp.experts.down_proj_scales"
    scales = models.tensors(tmp_path / "mxfp4")[name]
    scales[3] += 1
    models.edit(tmp_path / "mxfp4", name, scales)
    assert ("CK305", "model.layers.5.mlp.experts.3.down_proj.weight") in found(
        verify(tmp_path / "mxfp4", source=releases("gpt_oss"))
    )


def test_fp8_against_an_fp8_source_is_compared_bit_for_bit(fp8: Path, copy_of: CopyOf) -> None:
    assert verify(fp8, source=fp8).findings == []
    path = copy_of(fp8)
    name = EXPERT
    codes = models.tensors(path)[name].view(torch.uint8)
    codes[0, 0] ^= 1
    models.edit(path, name, codes.view(torch.float8_e4m3fn))
    assert ("CK202", name) in found(verify(path, source=fp8))


def test_plain_weights_against_their_fp8_release_are_compared_bit_for_bit(
    fp8: Path, releases: PathOf, tmp_path: Path
) -> None:
    def dequantized(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        _, meant = quantized.fp8_blocks(16, 16)(weight)
        return {"": meant}, meant

    path = tmp_path / "plain"
    meant = quantized.write(releases("qwen3_moe"), path, linear, dequantized, lambda config: config)
    assert verify(path, source=fp8).findings == []
    meant[EXPERT][0, 0] *= 1.0625
    models.edit(path, EXPERT, meant[EXPERT])
    assert found(verify(path, source=fp8)) == {("CK202", EXPERT)}


def test_unknown_fp8_is_inconclusive_and_not_failed(fp8: Path, copy_of: CopyOf, releases: PathOf) -> None:
    path = copy_of(fp8)
    edit_json(path / "config.json", lambda config: config["quantization_config"].update(scale_fmt="of tomorrow"))
    report = verify(path, source=releases("qwen3_moe"))
    assert {finding.code for finding in report.findings if finding.code in ("CK202", "CK203", "CK305")} == set()
    assert report.status == "inconclusive"
