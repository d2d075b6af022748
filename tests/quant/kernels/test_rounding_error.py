"""The error that `quantize` reports, against what other readers unpack."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from support.quant_weights import DTYPES
from torch import Tensor

from quant.formats.packing import Packed, unpack, unpack_zero_point
from quant.formats.scheme import QuantScheme
from quant.kernels.dispatch import quantize_pack
from quant.kernels.floats import Fp8Weight, quantize_fp8, quantize_mxfp4
from quant.kernels.rounding_error import float_error, int4_error
from quant.schemes.interface import SquaredError


def relative(weight: Tensor, unpacked: Tensor) -> float:
    return float((unpacked.double() - weight.double()).norm() / weight.double().norm())


@pytest.mark.parametrize("group", [32, 128, None])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_error_is_that_of_what_compressed_tensors_unpacks(
    dtype: torch.dtype, symmetric: bool, group: int | None
) -> None:
    weight = (torch.randn(300, 8192, generator=torch.Generator().manual_seed(0)) * 0.02 + 0.01).to(dtype)
    (packed,) = quantize_pack([weight], QuantScheme(group, "minmax", symmetric=symmetric), ["weight"])
    args = QuantizationArgs(num_bits=4, symmetric=symmetric, strategy="group" if group else "channel", group_size=group)
    zero = None if packed.zero_point is None else unpack_zero_point(packed.zero_point, packed.scale.shape)
    codes = unpack(packed.words, weight.shape)
    expected = relative(weight, dequantize(codes, packed.scale.double(), zero, args))
    assert int4_error(weight, packed).relative == pytest.approx(expected, rel=1e-4)


def test_the_error_of_a_few_weights_by_hand() -> None:
    """Codes 7 and 1 at a scale of 0.5 are 3.5 and 0.5: 0.5 and -0.25 away."""
    weight = torch.tensor([[3.0, 0.75, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    word = torch.tensor([[7 + 8 | (1 + 8) << 4] + [0x88] * 3], dtype=torch.uint8).view(torch.int32)
    found = int4_error(weight, Packed(word, torch.tensor([[0.5]]), None))
    assert found == SquaredError(0.3125, 9.5625)
    assert SquaredError.total([found, found]).relative == pytest.approx(0.1807754)


@pytest.mark.parametrize("block", [(128, 128), (1, None), (1, 32)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_error_is_that_of_codes_times_scales(dtype: torch.dtype, block: tuple[int, int | None]) -> None:
    weight = (torch.randn(200, 320, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    packed = quantize_fp8(weight, block, "slime", "weight")
    scales = packed.scales.repeat_interleave(block[0], 0).repeat_interleave(block[1] or 320, 1)[:200, :320]
    expected = relative(weight, packed.codes.double() * scales)
    assert float_error(weight, packed, block).relative == pytest.approx(expected, rel=1e-4)


def test_e2m1_error_is_that_of_codes_times_scales() -> None:
    """Codes 7 (6.0) and 9 (-0.5) at an exponent of -1 (126): 3.0 and -0.25."""
    packed = Fp8Weight(torch.tensor([[7 | 9 << 4]], dtype=torch.uint8), torch.tensor([[126]], dtype=torch.uint8))
    assert float_error(torch.tensor([[2.5, 0.25]]), packed, (1, 2)) == SquaredError(0.5, 6.3125)
    exact = torch.tensor([[6.0, -0.5, 1.5, -3.0] * 8])
    assert float_error(exact, quantize_mxfp4(exact, "weight"), (1, 32)).error == 0


def test_zeros_have_no_error_and_squares_beyond_float32_no_number() -> None:
    assert SquaredError(0.0, 0.0).relative == 0
    weight = torch.full((1, 32), 1e30)
    (packed,) = quantize_pack([weight], QuantScheme(32, "minmax"), ["weight"])
    assert int4_error(weight, packed).relative is None
