"""nvidia-modelopt's own MXFP8, by its formula in torch on the CPU, against what ckptkit writes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.quant_weights import DTYPES, hard_weights

from interop import beside
from quant.kernels.floats import quantize_fp8


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Codes by the weight's dtype, and their exponents as `DTYPE_scale`."""
    folder = tmp_path_factory.mktemp("modelopt")
    save_file({str(dtype): weights(dtype) for dtype in DTYPES}, folder / "plain.safetensors")
    beside.start("modelopt_worker", str(folder / "plain.safetensors"), str(folder / "mxfp8.safetensors"))
    return load_file(folder / "mxfp8.safetensors")


def weights(dtype: torch.dtype) -> torch.Tensor:
    """[1057, 512] of every kind that has broken a quantizer, and 1000 rows of many magnitudes."""
    torch.manual_seed(1)
    rows = torch.randn(1000, 512) * torch.exp2(torch.randint(-12, 4, (1000, 1)))
    return torch.cat([hard_weights(dtype, 512), rows.to(dtype)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mxfp8_has_modelopts_bytes(dtype: torch.dtype, theirs: dict[str, torch.Tensor]) -> None:
    found = quantize_fp8(weights(dtype), (1, 32), "modelopt", "a")
    assert torch.equal(found.scales, theirs[f"{dtype}_scale"])
    assert torch.equal(found.codes.view(torch.uint8), theirs[str(dtype)].view(torch.uint8))
