"""E2M1 codes and their scales: against values by hand, ml_dtypes' own conversion, and compressed-tensors' packing."""

from __future__ import annotations

import ml_dtypes
import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import MXFP4A16, NVFP4A16
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from support.quant_weights import DTYPES, hard_weights
from torch import Tensor

from ckptkit.core.errors import CkptkitError
from quant.kernels.floats import check_exact, quantize_mxfp4, quantize_nvfp4

WRITER = "compressed-tensors"
NVFP4_WRITERS = ["modelopt", WRITER]


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
    found = quantize_mxfp4(group(*numbers), "a")
    assert found.scales.tolist() == [[exponent]]
    assert "".join(f"{code:x}" for code in nibbles(found.codes)[0, : len(codes)].tolist()) == codes


@pytest.mark.parametrize("kernel", [True, False])
def test_every_bfloat16_is_rounded_to_a_code_as_ml_dtypes_does(kernel: bool) -> None:
    """All below 7, beside a 4, so that the scale is 1."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    numbers = every[every.abs() < 7]
    weight = torch.zeros(len(numbers), 32, dtype=torch.bfloat16)
    weight[:, 0], weight[:, 1] = 4, numbers
    found = quantize_mxfp4(weight, "a", kernel=kernel)
    assert bool((found.scales == 127).all())
    wanted = numbers.float().clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view("uint8") & 15
    wanted[(numbers == 0).numpy()] = 0  # -0 loses its sign
    assert nibbles(found.codes)[:, 1].tolist() == wanted.tolist()
    assert set(wanted.tolist()) == set(range(16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_gives_the_bits_of_plain_torch(dtype: torch.dtype) -> None:
    weight = torch.cat([hard_weights(dtype, 320) for _ in range(5)])
    found, wanted = (quantize_mxfp4(weight, "a", kernel=kernel) for kernel in (True, False))
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
    found = quantize_mxfp4(weight, "a")
    assert torch.equal(found.codes, wanted["weight_packed"])
    assert torch.equal(found.scales, wanted["weight_scale"])


def test_the_largest_weights_stay_finite() -> None:
    """compressed-tensors gives them a scale of NaN, byte 255."""
    found = quantize_mxfp4(group(torch.finfo(torch.bfloat16).max, -1e38), "a")
    assert found.scales.tolist() == [[252]]
    assert nibbles(found.codes)[0, :2].tolist() == [7, 0xC]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_with_the_tensors_name(value: float) -> None:
    weight = torch.ones(130, 160, dtype=torch.bfloat16)
    weight[129, 159] = value
    with pytest.raises(CkptkitError, match=r"a\.weight holds NaN or infinity"):
        quantize_mxfp4(weight, "a.weight")


def test_columns_that_groups_do_not_divide_are_refused() -> None:
    with pytest.raises(CkptkitError, match=r"a\.weight has 48 columns, which groups of 32 do not divide"):
        quantize_mxfp4(torch.ones(4, 48), "a.weight")


@pytest.mark.parametrize("shape", [(0, 32), (3, 0)])
def test_an_empty_matrix_has_no_codes(shape: tuple[int, int]) -> None:
    assert quantize_mxfp4(torch.empty(shape), "a").codes.shape == (shape[0], shape[1] // 2)


def test_exact_means_every_weight() -> None:
    weight = group(6.0, -0.5, 3.0) * 0.125
    check_exact(weight, quantize_mxfp4(weight, "a"), (1, 32), "a.weight")
    weight[0, 2] = 0.4
    with pytest.raises(CkptkitError, match=r"a\.weight: 1 of 32 weights are not exact: \[0, 2\] is 0\.400"):
        check_exact(weight, quantize_mxfp4(weight, "a"), (1, 32), "a.weight")


# The largest product of a code of E2M1 and a scale: beside it the scale of a tensor is 1.
LARGEST = torch.zeros(1, 16).index_fill_(1, torch.tensor([0]), 6 * 448)


def in_groups(numbers: Tensor) -> Tensor:
    """A row for each number, which begins with a 6: the scale is 1."""
    weight = torch.zeros(len(numbers), 16, dtype=numbers.dtype)
    weight[:, 0], weight[:, 1] = 6, numbers
    return weight


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("writer", NVFP4_WRITERS)
def test_every_bfloat16_is_rounded_to_nvfp4_as_ml_dtypes_does(writer: str, kernel: bool) -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    numbers = every[every.abs() <= 6]
    both = [LARGEST.bfloat16(), in_groups(numbers)]
    (_, found), second = quantize_nvfp4(both, writer, ["a", "b"], kernel=kernel)
    assert second.tolist() == (1 if writer == "modelopt" else [1])
    assert bool((found.scales.float() == 1).all())
    wanted = numbers.float().numpy().astype(ml_dtypes.float4_e2m1fn).view("uint8") & 15
    wanted[(numbers == 0).numpy()] = 0  # -0 loses its sign
    assert nibbles(found.codes)[:, 1].tolist() == wanted.tolist()
    assert set(wanted.tolist()) == set(range(16))


@pytest.mark.parametrize("writer", NVFP4_WRITERS)
def test_scales_are_the_nearest_float8(writer: str) -> None:
    """Of every positive bfloat16 up to 448, each the sixth part of a group's largest weight."""
    every = torch.arange(1, 1 << 15).to(torch.int16).view(torch.bfloat16)
    scales = every[every <= 448].float()
    weight = torch.cat([scales[:, None] * 6, torch.zeros(len(scales), 15)], 1)
    (_, found), _ = quantize_nvfp4([LARGEST, weight], writer, ["a", "b"])
    wanted = torch.from_numpy(scales.numpy().astype(ml_dtypes.float8_e4m3fn).view("uint8").copy())
    wanted[wanted == 0] = 1 if writer == "modelopt" else 0x20  # 2^-9, and 0.125
    assert torch.equal(found.scales.view(torch.uint8)[:, 0], wanted)
    assert set(wanted.tolist()) >= set(range(0x20, 0x7F))


@pytest.mark.parametrize(("writer", "zeros", "tiny"), [("modelopt", 0x38, 0x01), (WRITER, 0x20, 0x20)])
def test_a_group_of_zeros_has_its_writers_scale(writer: str, zeros: int, tiny: int) -> None:
    weight = torch.zeros(3, 16)
    weight[0, 0], weight[1, 0], weight[1, 1], weight[2, 3] = 2688, 2e-3, -2e-3, -0.0
    (found,), _ = quantize_nvfp4([weight], writer, ["a"])
    assert found.scales.view(torch.uint8).flatten().tolist() == [0x7E, tiny, zeros]
    small = [2, 0xA, 0, 0] if tiny == 1 else [0, 8, 0, 0]
    assert nibbles(found.codes)[:, :4].tolist() == [[7, 0, 0, 0], small, [0, 0, 0, 0]]


@pytest.mark.parametrize("writer", NVFP4_WRITERS)
@pytest.mark.parametrize("largest", [0.0, 1e-40])
def test_a_set_of_zeros_keeps_a_scale_that_is_one(writer: str, largest: float) -> None:
    """Of zeros alone ModelOpt would give a scale of 0 and NaN in every group."""
    both = [torch.zeros(2, 32), torch.full((1, 16), largest)]
    found, second = quantize_nvfp4(both, writer, ["a", "b"])
    assert second.flatten().tolist() == [1]
    for one in found:
        assert not one.codes.any()
        assert bool((one.scales.float() > 0).all())


@pytest.mark.parametrize("writer", NVFP4_WRITERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_gives_nvfp4_of_plain_torch(dtype: torch.dtype, writer: str) -> None:
    weights = [torch.cat([hard_weights(dtype, 320) for _ in range(3)]), hard_weights(dtype, 64)]
    (found, second), (wanted, same) = (quantize_nvfp4(weights, writer, ["a", "b"], kernel=one) for one in (True, False))
    assert torch.equal(second, same)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours.codes, theirs.codes)
        assert torch.equal(ours.scales.view(torch.uint8), theirs.scales.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_nvfp4_is_what_compressed_tensors_packs_itself(dtype: torch.dtype) -> None:
    """Of three weights that share a scale. Not of float16, in which compressed-tensors' scale overflows."""
    args = NVFP4A16["weights"]
    torch.manual_seed(2)
    weights = [hard_weights(dtype, 512) * 2.0**-126, *(torch.randn(64, 512).to(dtype) * size for size in (0.02, 0.5))]
    every = torch.cat(weights)
    shared = generate_gparam(every.amin(), every.amax())
    found, second = quantize_nvfp4(weights, WRITER, ["a", "b", "c"])
    assert torch.equal(second, shared)
    for weight, ours in zip(weights, found, strict=True):
        groups = weight.unflatten(1, (-1, 16))
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=shared)
        parts = {"weight": weight, "weight_scale": scale, "weight_global_scale": shared}
        wanted = NVFP4PackedCompressor.compress(parts, QuantizationScheme(targets=["Linear"], weights=args))
        assert torch.equal(ours.codes, wanted["weight_packed"])
        assert torch.equal(ours.scales.view(torch.uint8), wanted["weight_scale"].view(torch.uint8))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("writer", NVFP4_WRITERS)
def test_nvfp4_refuses_what_is_not_finite_in_any_of_a_set(value: float, writer: str) -> None:
    weights = [torch.ones(4, 32), torch.ones(4, 32)]
    weights[1][3, 31] = value
    with pytest.raises(CkptkitError, match=r"b\.weight holds NaN or infinity"):
        quantize_nvfp4(weights, writer, ["a.weight", "b.weight"])


def test_nvfp4_refuses_columns_that_groups_do_not_divide() -> None:
    with pytest.raises(CkptkitError, match=r"a\.weight has 24 columns, which groups of 16 do not divide"):
        quantize_nvfp4([torch.ones(4, 24)], WRITER, ["a.weight"])


@pytest.mark.parametrize("shape", [(0, 32), (3, 0)])
def test_an_empty_matrix_has_no_nvfp4_codes(shape: tuple[int, int]) -> None:
    (found,), second = quantize_nvfp4([torch.empty(shape)], WRITER, ["a"])
    assert (found.codes.shape, second.tolist()) == ((shape[0], shape[1] // 2), [1])
