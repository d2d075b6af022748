"""Codes and scales of FP8 and E2M1: by hand, torch's and ml_dtypes' conversion, transformers, compressed-tensors."""

from functools import partial
from types import SimpleNamespace

import ml_dtypes
import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import MXFP4A16, NVFP4A16
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from support.messages import refusal
from support.processes import python
from support.quant_weights import DTYPES, hard_weights
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from ckptkit.core.errors import CkptkitError
from ckptkit.quant.kernels.float_roundings import ROUNDINGS
from ckptkit.quant.kernels.floats import quantize_fp8, quantize_mxfp4, quantize_nvfp4

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


def ragged(dtype):
    """Matrices of every kind, and sides that 128 and 32 do not divide."""
    weight = torch.cat([hard_weights(dtype, 300)[:-1] for _ in range(5)])
    weight[:128, :128] = 0
    weight[-1, -1] = -0.0
    return weight


def same(left, right):
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def test_blocks_have_the_bits_that_their_writers_give_them():
    for rounding, weights, scale, codes in BY_HAND:
        found = quantize_fp8(torch.tensor(weights).bfloat16(), (128, 128), rounding, "a")
        assert found.scales.view(torch.int32).tolist() == [[scale]], rounding
        assert found.codes.view(torch.uint8).numpy().tobytes().hex() == codes, rounding


@pytest.mark.parametrize(
    ("weights", "exponent", "codes"),
    [
        ([1.75, -0.4, 0.2, 0.02], 119, "7eed654a"),
        ([1.765625, -0.4, 0.2, 0.02], 120, "76e55d42"),
        ([0.0, -0.0, 0.0, 0.0], 0, "00800000"),
        ([448.0, 2.0**-9, -(2.0**-10), 3 * 2.0**-10], 127, "7e018002"),
    ],
)
def test_mxfp8_has_the_exponent_and_codes_of_its_writers(weights, exponent, codes):
    found = quantize_fp8(torch.tensor([weights]).bfloat16(), (1, 32), "modelopt", "a")
    assert found.scales.dtype == torch.uint8
    assert found.scales.tolist() == [[exponent]]
    assert found.codes.view(torch.uint8).numpy().tobytes().hex() == codes


def test_every_float_is_rounded_to_a_code_as_torch_does():
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
def test_transformers_rounding_is_what_it_writes_itself(dtype):
    weight = hard_weights(dtype, 256)[:32].repeat(8, 1)
    config = SimpleNamespace(weight_block_size=[128, 128], scale_fmt="float")
    wanted = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"a.weight": weight})
    found = quantize_fp8(weight, (128, 128), "transformers", "a")
    assert same(found.codes, wanted["a.weight"])
    assert same(found.scales, wanted["a.weight_scale_inv"])


@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
@pytest.mark.parametrize("strategy", ["block", "channel"])
def test_compressed_tensors_rounding_is_what_it_writes_itself(strategy, dtype):
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


WRITER = "compressed-tensors"
EIGHT_BIT = [name for name, one in ROUNDINGS.items() if not one.four_bit]
NVFP4_WRITERS = ["modelopt", WRITER]


def nibbles(codes):
    """One code each, the low half of a byte first."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def group(*numbers):
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
def test_a_group_has_the_exponent_and_codes_of_its_writer(numbers, exponent, codes):
    found = quantize_mxfp4(group(*numbers), "a")
    assert found.scales.tolist() == [[exponent]]
    assert "".join(f"{code:x}" for code in nibbles(found.codes)[0, : len(codes)].tolist()) == codes


@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_mxfp4_is_what_compressed_tensors_packs_itself(dtype):
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


def test_the_largest_weights_stay_finite():
    """compressed-tensors gives them a scale of NaN, byte 255."""
    found = quantize_mxfp4(group(torch.finfo(torch.bfloat16).max, -1e38), "a")
    assert found.scales.tolist() == [[252]]
    assert nibbles(found.codes)[0, :2].tolist() == [7, 0xC]


# The largest product of a code of E2M1 and a scale: beside it the scale of a tensor is 1.
LARGEST = torch.zeros(1, 16).index_fill_(1, torch.tensor([0]), 6 * 448)


def in_groups(numbers):
    """A row for each number, which begins with a 6: the scale is 1."""
    weight = torch.zeros(len(numbers), 16, dtype=numbers.dtype)
    weight[:, 0], weight[:, 1] = 6, numbers
    return weight


@pytest.mark.parametrize("writer", NVFP4_WRITERS)
def test_every_bfloat16_is_rounded_to_nvfp4_as_ml_dtypes_does(writer):
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    numbers = every[every.abs() <= 6]
    both = [LARGEST.bfloat16(), in_groups(numbers)]
    (_, found), second = quantize_nvfp4(both, writer, ["a", "b"])
    assert second.tolist() == (1 if writer == "modelopt" else [1])
    assert bool((found.scales.float() == 1).all())
    wanted = numbers.float().numpy().astype(ml_dtypes.float4_e2m1fn).view("uint8") & 15
    wanted[(numbers == 0).numpy()] = 0  # -0 loses its sign
    assert nibbles(found.codes)[:, 1].tolist() == wanted.tolist()
    assert set(wanted.tolist()) == set(range(16))


@pytest.mark.parametrize("writer", NVFP4_WRITERS)
def test_scales_are_the_nearest_float8(writer):
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
def test_a_group_of_zeros_has_its_writers_scale(writer, zeros, tiny):
    weight = torch.zeros(3, 16)
    weight[0, 0], weight[1, 0], weight[1, 1], weight[2, 3] = 2688, 2e-3, -2e-3, -0.0
    (found,), _ = quantize_nvfp4([weight], writer, ["a"])
    assert found.scales.view(torch.uint8).flatten().tolist() == [0x7E, tiny, zeros]
    small = [2, 0xA, 0, 0] if tiny == 1 else [0, 8, 0, 0]
    assert nibbles(found.codes)[:, :4].tolist() == [[7, 0, 0, 0], small, [0, 0, 0, 0]]


@pytest.mark.parametrize("writer", NVFP4_WRITERS)
@pytest.mark.parametrize("largest", [0.0, 1e-40])
def test_a_set_of_zeros_keeps_a_scale_that_is_one(writer, largest):
    """Of zeros alone ModelOpt would give a scale of 0 and NaN in every group."""
    both = [torch.zeros(2, 32), torch.full((1, 16), largest)]
    found, second = quantize_nvfp4(both, writer, ["a", "b"])
    assert second.flatten().tolist() == [1]
    for one in found:
        assert not one.codes.any()
        assert bool((one.scales.float() > 0).all())


@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_nvfp4_is_what_compressed_tensors_packs_itself(dtype):
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


def in_nvfp4(writer, weight, name, *, kernel=True):
    """As the last of several weights that share a scale."""
    (_, found), second = quantize_nvfp4([torch.ones_like(weight), weight], writer, ["other", name], kernel=kernel)
    return found._replace(scales=torch.cat([found.scales.float().flatten(), second.flatten()]))


def in_fp8(block, rounding, weight, name, **how):
    return quantize_fp8(weight, block, rounding, name, **how)


FORMATS = {
    **{f"fp8 {rounding} {block}": partial(in_fp8, block, rounding) for rounding in EIGHT_BIT for block in BLOCKS},
    "mxfp4": quantize_mxfp4,
    **{f"nvfp4 {writer}": partial(in_nvfp4, writer) for writer in NVFP4_WRITERS},
}
FEW = [name for name in FORMATS if "fp8" not in name or "online" in name]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_gives_the_bits_of_plain_torch(dtype):
    for name, quantize in FORMATS.items():
        weight = ragged(dtype) if "fp8" in name else torch.cat([hard_weights(dtype, 320) for _ in range(5)])
        found, wanted = (quantize(weight, "a", kernel=kernel) for kernel in (True, False))
        assert same(found.codes, wanted.codes), name
        assert same(found.scales, wanted.scales), name


@pytest.mark.parametrize("name", FEW)
def test_what_has_no_codes_is_refused_by_name_and_an_empty_matrix_is_not(name):
    quantize = FORMATS[name]
    for value in (float("nan"), float("inf"), -float("inf")):
        weight = torch.ones(130, 160, dtype=torch.bfloat16)
        weight[129, 159] = value
        refusal(r"a\.weight.*NaN", quantize, weight, "a.weight")
    for other in (torch.ones(4), torch.ones(4, 4, dtype=torch.int8)):
        refusal("bfloat16, float16 or float32", quantize, other, "a.weight")
    for rows, columns in ((0, 128), (128, 0)):
        codes = quantize(torch.empty(rows, columns), "a").codes
        assert codes.shape == (rows, columns if "fp8" in name else columns // 2)


@pytest.mark.parametrize(("name", "groups"), [("mxfp4", 32), ("nvfp4 modelopt", 16)])
def test_columns_that_groups_do_not_divide_are_refused(name, groups):
    with pytest.raises(CkptkitError, match=f"24.*{groups}"):
        FORMATS[name](torch.ones(4, 24), "a.weight")


@pytest.mark.nightly
def test_the_triton_kernel_gives_the_bytes_of_the_formulas_and_marks_what_is_not_finite():
    """Without a GPU: in Triton's interpreter, which a process chooses when it starts."""
    pytest.importorskip("triton")
    done = python("-W", "ignore", "-m", "support.triton_floats", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    # Ten formulas of blocks, with bfloat16 eight, in three dtypes; three matrices.
    assert done.stdout.splitlines() == [f"{(8 + 10 + 10) * 3} compared", "differ: []", "unmarked: []"]
