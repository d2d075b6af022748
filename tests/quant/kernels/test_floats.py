"""FP8 codes and scales: against values written by hand, torch's own conversion, transformers and compressed-tensors."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from support.quant_weights import DTYPES, hard_weights
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from ckptkit.core.errors import CkptkitError
from quant.kernels.floats import ROUNDINGS, check_exact, quantize_fp8, quantize_fp8_in_torch

BLOCKS = [(128, 128), (1, None), (1, 32)]
# One block each: weights, and by the writer the scale's bits and the codes, from runs of the writers' own code.
FIRST = [[0.337890625, -0.0131225586], [1.2265625, 0.0021057129]]
SECOND = [[0.65625, -0.314453125], [-0.466796875, -0.36328125]]
BY_HAND = [
    ("slime", FIRST, 0x3B336DB7, "6fca7e34"),
    ("transformers", FIRST, 0x3B336DB7, "6fca7e34"),
    ("online", FIRST, 0x3B336DB7, "6fca7e34"),
    ("deepgemm", FIRST, 0x3B800000, "6bc57a31"),
    ("slime", SECOND, 0x3AC00000, "7ef5faf8"),
    ("transformers", SECOND, 0x3AC00000, "7ef5faf8"),
    ("slime-cuda", SECOND, 0x3AC00001, "7ef5faf7"),
    ("online", SECOND, 0x3AC00001, "7ef5faf7"),
    ("deepgemm", SECOND, 0x3B000000, "7af2f7f4"),
    ("slime", [[1e-6, -2.5e-7]], 0x31192492, "7eee"),
    ("slime", [[0.0, 0.0]], 0x27212492, "0000"),
    ("online", [[0.0, 0.0]], 0x2A7B5124, "0000"),
    ("transformers", [[0.0, 0.0]], 0x3F800000, "0000"),
    ("deepgemm", [[0.0, 0.0]], 0x34800000, "0000"),
]


def ragged(dtype: torch.dtype) -> Tensor:
    """Matrices of every kind, and sides that 128 and 32 do not divide."""
    weight = torch.cat([hard_weights(dtype, 300)[:-1] for _ in range(5)])
    weight[:128, :128] = 0
    weight[-1, -1] = -0.0
    return weight


def same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have one dtype and the same bits."""
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize(("rounding", "weights", "scale", "codes"), BY_HAND)
def test_a_block_has_the_bits_that_its_writer_gives_it(
    rounding: str, weights: list[list[float]], scale: int, codes: str
) -> None:
    found = quantize_fp8(torch.tensor(weights).bfloat16(), (128, 128), rounding, "a")
    assert found.scales.view(torch.int32).tolist() == [[scale]]
    assert found.codes.view(torch.uint8).numpy().tobytes().hex() == codes


@pytest.mark.parametrize(
    ("weights", "exponent", "codes"),
    [
        ([1.75, -0.4, 0.2, 0.02], 119, "7eed654a"),
        ([1.765625, -0.4, 0.2, 0.02], 120, "76e55d42"),
        ([0.0, -0.0, 0.0, 0.0], 0, "00800000"),
        ([448.0, 2.0**-9, -(2.0**-10), 3 * 2.0**-10], 127, "7e018002"),
    ],
)
def test_mxfp8_has_the_exponent_and_codes_of_its_writers(weights: list[float], exponent: int, codes: str) -> None:
    found = quantize_fp8(torch.tensor([weights]).bfloat16(), (1, 32), "modelopt", "a")
    assert found.scales.dtype == torch.uint8
    assert found.scales.tolist() == [[exponent]]
    assert found.codes.view(torch.uint8).numpy().tobytes().hex() == codes


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_an_mxfp8_exponent_is_the_smallest_that_holds_the_group(dtype: torch.dtype) -> None:
    """By exact fractions, without floating point."""
    weight = hard_weights(dtype, 96)
    found = quantize_fp8(weight, (1, 32), "modelopt", "a")
    for group, exponent in zip(weight.reshape(-1, 32).tolist(), found.scales.flatten().tolist(), strict=True):
        most = max(abs(Fraction(number)) for number in group)
        assert most <= 448 * Fraction(2) ** (exponent - 127)
        assert exponent == 0 or most > 448 * Fraction(2) ** (exponent - 128)


def test_every_float_is_rounded_to_a_code_as_torch_does() -> None:
    """All bfloat16 that are finite and the neighbours of all ties, at a scale of 1: 448 is in every row."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).float()
    values = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (values[:-1] + values[1:]) / 2
    near = torch.cat([ties, ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(448.0)), values])
    numbers = torch.cat([every[every.abs() <= 448], near, -near])
    rows = torch.cat([torch.full((len(numbers), 1), 448.0), numbers[:, None]], 1)
    found = quantize_fp8(rows, (1, None), "slime", "a")
    assert bool((found.scales == 1).all())
    assert same(found.codes[:, 1], numbers.to(torch.float8_e4m3fn))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_gives_the_bits_of_plain_torch(dtype: torch.dtype) -> None:
    weight = ragged(dtype)
    for rounding, block in product(ROUNDINGS, BLOCKS):
        found, wanted = (run(weight, block, rounding, "a") for run in (quantize_fp8, quantize_fp8_in_torch))
        assert same(found.codes, wanted.codes), (rounding, block)
        assert same(found.scales, wanted.scales), (rounding, block)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transformers_rounding_is_what_it_writes_itself(dtype: torch.dtype) -> None:
    weight = hard_weights(dtype, 256)[:32].repeat(8, 1)
    config = SimpleNamespace(weight_block_size=[128, 128], scale_fmt="float")
    wanted = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"a.weight": weight})
    found = quantize_fp8(weight, (128, 128), "transformers", "a")
    assert same(found.codes, wanted["a.weight"])
    assert same(found.scales, wanted["a.weight_scale_inv"])


@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
@pytest.mark.parametrize("strategy", ["block", "channel"])
def test_compressed_tensors_rounding_is_what_it_writes_itself(strategy: str, dtype: torch.dtype) -> None:
    weight = hard_weights(dtype, 384)[:32].repeat(8, 1)
    blocks = {"block_structure": [128, 128]} if strategy == "block" else {}
    args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True, **blocks)
    tiles = weight.view(2, 128, 3, 128) if strategy == "block" else weight
    axes = (1, 3) if strategy == "block" else (1,)
    low, high = tiles.amin(axes, keepdim=strategy == "channel"), tiles.amax(axes, keepdim=strategy == "channel")
    scale, _ = calculate_qparams(low, high, args)
    content = {"weight": weight, "weight_scale": scale}
    wanted = FloatQuantizationCompressor.compress(content, QuantizationScheme(targets=["Linear"], weights=args))
    found = quantize_fp8(weight, (128, 128) if strategy == "block" else (1, None), "compressed-tensors", "a")
    assert same(found.scales, scale)
    assert same(found.codes, wanted["weight"])


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_with_the_tensors_name(value: float, block: tuple[int, int | None]) -> None:
    weight = torch.ones(130, 160, dtype=torch.bfloat16)
    weight[129, 159] = value
    with pytest.raises(CkptkitError, match=r"a\.weight holds NaN or infinity"):
        quantize_fp8(weight, block, "online", "a.weight")


@pytest.mark.parametrize("weight", [torch.ones(4), torch.ones(4, 4, dtype=torch.int8)])
def test_what_is_not_a_float_matrix_is_refused(weight: Tensor) -> None:
    with pytest.raises(CkptkitError, match="only matrices in bfloat16, float16 or float32 can be quantized"):
        quantize_fp8(weight, (128, 128), "online", "a.weight")


@pytest.mark.parametrize("shape", [(0, 128), (128, 0)])
def test_an_empty_matrix_has_no_codes(shape: tuple[int, int]) -> None:
    assert quantize_fp8(torch.empty(shape), (128, 128), "online", "a").codes.shape == shape


def mxfp4_values(spread: int) -> Tensor:
    """Every E2M1 number in groups of 32 whose exponents differ by up to `spread`; bfloat16 [128, 128]."""
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).repeat(128, 8)
    exponents = torch.arange(128 * 4).reshape(128, 4) % (spread + 1) - spread
    return (numbers * (2.0**exponents).repeat_interleave(32, 1)).bfloat16()


def test_mxfp4_is_exact_in_blocks_of_powers_of_two_as_far_as_their_exponents_reach() -> None:
    """By hand: 6 x 2^e has a scale of 2^(e - 6), so that 0.5 x 2^(e - spread) needs a step of 2^-9 x 2^(e - 6)."""
    weight = mxfp4_values(14)
    check_exact(weight, quantize_fp8(weight, (128, 128), "deepgemm", "a"), (128, 128), "a")
    weight = mxfp4_values(15)
    # Of exponent -15 the numbers 0.5 and 1.5, each 2 x 2 times a group, in 32 groups.
    with pytest.raises(CkptkitError, match=r"a\.weight: 256 of 16384 weights are not exact: \[0, 1\] is"):
        check_exact(weight, quantize_fp8(weight, (128, 128), "deepgemm", "a"), (128, 128), "a.weight")


def test_mxfp4_is_always_exact_in_mxfp8() -> None:
    weight = mxfp4_values(60)
    check_exact(weight, quantize_fp8(weight, (1, 32), "modelopt", "a"), (1, 32), "a")


def test_float_scales_are_not_exact() -> None:
    weight = mxfp4_values(0)
    with pytest.raises(CkptkitError, match="weights are not exact"):
        check_exact(weight, quantize_fp8(weight, (128, 128), "online", "a"), (128, 128), "a")
