"""nvidia-modelopt's own MXFP8 and NVFP4, by its formulas in torch on the CPU, against what ckptkit writes."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.quant_weights import DTYPES, hard_weights

from ckptkit.quant.kernels.floats import quantize_fp8, quantize_nvfp4
from interop import beside


def weights(dtype):
    """Of every kind that has broken a quantizer; then of many magnitudes, beside usual ones."""
    torch.manual_seed(1)
    rows = torch.randn(1000, 512) * torch.exp2(torch.randint(-12, 4, (1000, 1)))
    usual = torch.randn(64, 512) * 0.02
    usual[:, :32] = 0
    hard = torch.cat([hard_weights(dtype, 512), rows.to(dtype)])
    short = str(dtype).removeprefix("torch.")
    return {f"hard-{short}.x": hard, f"{short}.rows": rows.to(dtype), f"{short}.usual": usual.to(dtype)}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modelopt")
    plain = {name: weight for dtype in DTYPES for name, weight in weights(dtype).items()}
    save_file(plain, folder / "plain.safetensors")
    beside.start("modelopt_worker", str(folder / "plain.safetensors"), str(folder / "out.safetensors"))
    return load_file(folder / "out.safetensors")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mxfp8_has_modelopts_bytes(dtype, theirs):
    for name, weight in weights(dtype).items():
        found = quantize_fp8(weight, (1, 32), "modelopt", "a")
        assert torch.equal(found.scales, theirs[f"mxfp8.{name}_scale"]), name
        assert torch.equal(found.codes.view(torch.uint8), theirs[f"mxfp8.{name}"].view(torch.uint8)), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nvfp4_has_modelopts_bytes(dtype, theirs):
    hard, *others = weights(dtype)
    for names in ([hard], others):
        found, second = quantize_nvfp4([weights(dtype)[name] for name in names], "modelopt", names)
        for name, ours in zip(names, found, strict=True):
            assert torch.equal(second, theirs[f"nvfp4.{name}_scale_2"]), name
            assert torch.equal(ours.scales.view(torch.uint8), theirs[f"nvfp4.{name}_scale"].view(torch.uint8)), name
            assert torch.equal(ours.codes, theirs[f"nvfp4.{name}"]), name
