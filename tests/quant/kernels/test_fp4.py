"""E2M1 codes and their scales: against values by hand, ml_dtypes' own conversion, and compressed-tensors' packing."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import MXFP4A16
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from support.quant_weights import DTYPES, hard_weights
from torch import Tensor

from ckptkit.core.errors import CkptkitError
from quant.kernels.float_roundings import Fp8Weight
from quant.kernels.floats import check_exact, quantize_mxfp4, quantize_mxfp4_in_torch

WRITER = "compressed-tensors"


def nibbles(codes: Tensor) -> Tensor:
    """One code each, the low half of a byte first."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def group(*numbers: float) -> Tensor:
    """One group of 32 that begins so and ends in zeros."""
    return torch.tensor([[*numbers, *[0.0] * (32 - len(numbers))]]).bfloat16()


@pytest.mark.parametrize(
    ("numbers", "exponent", "codes"),
    [
        ((6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75), 127, "70224466" + "8a"),
        ((6.03125, 1.0, 0.5, -3.0), 127, "721d"),
        ((7.0, -3.0), 128, "6b"),
        ((1.75, -0.5), 126, "6a"),
        ((0.0, -0.0), 0, "00"),
        ((1e-38, -1e-38), 0, "3b"),
    ],
)
def test_a_group_has_the_exponent_and_codes_of_its_writer(
    numbers: tuple[float, ...], exponent: int, codes: str
) -> None:
    found = quantize_mxfp4(group(*numbers), WRITER, "a")
    assert found.scales.tolist() == [[exponent]]
    assert "".join(f"{code:x}" for code in nibbles(found.codes)[0, : len(codes)].tolist()) == codes


@pytest.mark.parametrize("quantize", [quantize_mxfp4, quantize_mxfp4_in_torch])
def test_every_bfloat16_is_rounded_to_a_code_as_ml_dtypes_does(quantize: Callable[..., Fp8Weight]) -> None:
    """All below 7, beside a 4, so that the scale is 1."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    numbers = every[every.abs() < 7]
    weight = torch.zeros(len(numbers), 32, dtype=torch.bfloat16)
    weight[:, 0], weight[:, 1] = 4, numbers
    found = quantize(weight, WRITER, "a")
    assert bool((found.scales == 127).all())
    wanted = numbers.float().clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view("uint8") & 15
    wanted[(numbers == 0).numpy()] = 0  # -0 loses its sign
    assert nibbles(found.codes)[:, 1].tolist() == wanted.tolist()
    assert set(wanted.tolist()) == set(range(16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_gives_the_bits_of_plain_torch(dtype: torch.dtype) -> None:
    weight = torch.cat([hard_weights(dtype, 320) for _ in range(5)])
    found, wanted = (run(weight, WRITER, "a") for run in (quantize_mxfp4, quantize_mxfp4_in_torch))
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.scales, wanted.scales)


@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_mxfp4_is_what_compressed_tensors_packs_itself(dtype: torch.dtype) -> None:
    """Not of float16: there its scales below 2^-24 become 1, and their weights zero."""
    args = MXFP4A16["weights"]
    weight = hard_weights(dtype, 512)
    groups = weight.unflatten(1, (-1, 32))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    wanted = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    found = quantize_mxfp4(weight, WRITER, "a")
    assert torch.equal(found.codes, wanted["weight_packed"])
    assert torch.equal(found.scales, wanted["weight_scale"])


def test_the_largest_weights_stay_finite() -> None:
    """compressed-tensors gives them a scale of NaN, byte 255."""
    found = quantize_mxfp4(group(torch.finfo(torch.bfloat16).max, -1e38), WRITER, "a")
    assert found.scales.tolist() == [[252]]
    assert nibbles(found.codes)[0, :2].tolist() == [7, 0xC]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_with_the_tensors_name(value: float) -> None:
    weight = torch.ones(130, 160, dtype=torch.bfloat16)
    weight[129, 159] = value
    with pytest.raises(CkptkitError, match=r"a\.weight holds NaN or infinity"):
        quantize_mxfp4(weight, WRITER, "a.weight")


def test_columns_that_groups_do_not_divide_are_refused() -> None:
    with pytest.raises(CkptkitError, match=r"a\.weight has 48 columns, which groups of 32 do not divide"):
        quantize_mxfp4(torch.ones(4, 48), WRITER, "a.weight")


@pytest.mark.parametrize("shape", [(0, 32), (3, 0)])
def test_an_empty_matrix_has_no_codes(shape: tuple[int, int]) -> None:
    assert quantize_mxfp4(torch.empty(shape), WRITER, "a").codes.shape == (shape[0], shape[1] // 2)


def test_exact_means_every_weight() -> None:
    weight = group(6.0, -0.5, 3.0) * 0.125
    check_exact(weight, quantize_mxfp4(weight, WRITER, "a"), (1, 32), "a.weight")
    weight[0, 2] = 0.4
    with pytest.raises(CkptkitError, match=r"a\.weight: 1 of 32 weights are not exact: \[0, 2\] is 0\.400"):
        check_exact(weight, quantize_mxfp4(weight, WRITER, "a"), (1, 32), "a.weight")
