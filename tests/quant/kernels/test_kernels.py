"""The one-pass CPU kernel against the formulas of `ckptkit.quant.formats.grids`, bit for bit, and its error."""

import math
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from support.messages import refusal, text_with
from support.quant_weights import DTYPES, hard_weights

from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.grids import quantize
from ckptkit.quant.formats.packing import Packed, pack, pack_zero_point, unpack, unpack_zero_point
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.quant.kernels import cpu
from ckptkit.quant.kernels.dispatch import quantize_pack
from ckptkit.quant.kernels.float_roundings import Fp8Weight
from ckptkit.quant.kernels.floats import quantize_fp8, quantize_mxfp4
from ckptkit.quant.kernels.rounding_error import float_error, int4_error
from ckptkit.quant.schemes.interface import SquaredError

GRIDS = [("qmax7", True), ("minmax", True), ("minmax", False)]


def by_formula(weight, scheme):
    codes, scale, zero_point = quantize(weight, scheme)
    return Packed(pack(codes), scale, None if zero_point is None else pack_zero_point(zero_point))


def same(left, right):
    return [*map(described, left)] == [*map(described, right)]


def described(part):
    return part if part is None else (part.dtype, part.shape, part.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize(("grid", "symmetric"), GRIDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_is_that_of_the_formula(dtype, grid, symmetric):
    weight = hard_weights(dtype)
    for group_size, stored in product([32, 64, 128, None], [None, *DTYPES]):
        # The last row is too large for a float16 scale, unless it is float16 itself.
        rows = weight[:-1] if stored == torch.float16 and dtype != torch.float16 else weight
        scheme = QuantScheme(group_size, grid, (), symmetric, scale_dtype=stored)
        (packed,) = quantize_pack([rows], scheme, ["a"])
        assert packed.words.dtype == torch.int32
        assert same(packed, by_formula(rows, scheme)), scheme


@pytest.mark.parametrize(("grid", "symmetric"), GRIDS)
def test_whole_rows_of_any_number_of_words(grid, symmetric):
    scheme = QuantScheme(None, grid, (), symmetric)
    for columns in (8, 24, 32, 40, 4104):
        weight = torch.randn(5, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
        weight[1, -1] = 9.0  # the largest weight in the part that fills no vector
        assert same(quantize_pack([weight], scheme, ["a"])[0], by_formula(weight, scheme)), columns
    assert quantize_pack([], scheme, []) == []
    for shape in ((0, 64), (3, 0), (0, 0)):
        (packed,) = quantize_pack([torch.empty(shape)], scheme, ["a"])
        assert packed.words.shape == (shape[0], shape[1] // 8)
        assert same(packed, by_formula(torch.empty(shape), scheme))


def test_several_matrices_and_many_callers():
    """Parts of one matrix, of several, and of several callers at once share the threads and do not get mixed up."""
    torch.manual_seed(0)
    weights = [torch.randn(rows, 1024).bfloat16() for rows in (3000, 1, 700, 2049)]
    scheme = QuantScheme(32, "minmax", (), False)
    expected = [by_formula(weight, scheme) for weight in weights]
    with ThreadPoolExecutor(4) as callers:
        results = list(callers.map(lambda _: quantize_pack(weights, scheme, ["a", "b", "c", "d"]), range(8)))
    for packed in results:
        assert all(map(same, packed, expected))


def test_after_a_fork():
    """A child process has none of its parent's threads. (numpy compares: torch's threads do not survive either.)"""

    def words():
        return quantize_pack([weight], QuantScheme(32, "qmax7"), ["a"])[0].words.numpy().tobytes()

    weight = torch.randn(3000, 1024)
    expected = words()
    child = os.fork()
    if not child:
        os._exit(words() != expected)
    for _ in range(200):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child waits for threads")
    assert os.waitstatus_to_exitcode(status) == 0


def test_what_is_not_contiguous_or_aligned():
    torch.manual_seed(0)
    whole = torch.randn(65, 129).bfloat16()
    for weight in [
        whole[:64, :128],
        whole[1:65, 1:129],
        whole.T[:128, :64],
        whole.flatten()[1:8193].reshape(64, 128),
        torch.nn.Parameter(whole[:64, :64]),
    ]:
        scheme = QuantScheme(32, "qmax7")
        assert same(quantize_pack([weight], scheme, ["a"])[0], by_formula(weight.detach(), scheme))


def test_without_a_writable_cache_the_kernel_is_compiled_all_the_same(monkeypatch):
    weight, scheme = torch.randn(8, 64), QuantScheme(32, "qmax7")
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    cpu.kernel.cache_clear()
    try:
        assert same(quantize_pack([weight], scheme, ["a"])[0], by_formula(weight, scheme))
        assert cpu.kernel(torch.float32, torch.float32, "qmax7", True).stats.cache_path is None
    finally:
        cpu.kernel.cache_clear()


@pytest.mark.parametrize(("grid", "symmetric"), GRIDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_refuses_what_is_not_finite_by_name(dtype, grid, symmetric):
    for value, (group_size, columns) in product((math.nan, math.inf, -math.inf), ((32, 64), (None, 40))):
        weight = torch.ones(8, columns, dtype=dtype)
        weight[7, columns - 1] = value
        scheme = QuantScheme(group_size, grid, (), symmetric)
        for quantized in (
            lambda pair, scheme=scheme: quantize_pack(pair, scheme, ["layers.0.q", "layers.1.q"]),
            lambda pair, scheme=scheme: quantize(pair[1], scheme, "layers.1.q"),
        ):
            refusal(r"^layers\.1\.q.*NaN", quantized, [torch.ones_like(weight), weight])


def test_refuses_scales_and_ranges_that_overflow():
    for grid in ("qmax7", "minmax"):
        with pytest.raises(CkptkitError, match="float16") as error:
            quantize_pack([torch.full((1, 32), 1e38)], QuantScheme(32, grid, scale_dtype=torch.float16), ["a"])
        assert error.value.hint == text_with("--scale-dtype float32")
    weight = torch.tensor([[3e38, -3e38]]).repeat(1, 16)
    refusal("float32", quantize_pack, [weight], QuantScheme(32, "minmax", (), symmetric=False), ["a"])


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(8, 96), "96.*features.*64"),
        (torch.ones(8, 64, dtype=torch.float64), r"^b is \[8, 64\] float64"),
        (torch.ones(64), r"^b is \[64\] float32"),
        (torch.ones(8, 64, device="meta"), "^b .*meta.* a .*cpu"),
    ],
)
def test_refuses_what_cannot_be_packed_by_name(weight, message):
    refusal(message, quantize_pack, [torch.ones(1, 64), weight], QuantScheme(64, "qmax7"), ["a", "b"])


def test_a_search_goes_through_the_same_door():
    weight, scheme = hard_weights(torch.bfloat16)[:-1], QuantScheme(64, "minmax", (), False, "mse")
    assert same(quantize_pack([weight], scheme, ["a"])[0], by_formula(weight, scheme))


def relative(weight, unpacked):
    return float((unpacked.double() - weight.double()).norm() / weight.double().norm())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("dtype", "group"), [(DTYPES[0], 32), (DTYPES[1], 128), (DTYPES[2], None)])
def test_int4_error_is_that_of_what_compressed_tensors_unpacks(dtype, symmetric, group):
    weight = (torch.randn(300, 8192, generator=torch.Generator().manual_seed(0)) * 0.02 + 0.01).to(dtype)
    (packed,) = quantize_pack([weight], QuantScheme(group, "minmax", symmetric=symmetric), ["weight"])
    args = QuantizationArgs(num_bits=4, symmetric=symmetric, strategy="group" if group else "channel", group_size=group)
    zero = None if packed.zero_point is None else unpack_zero_point(packed.zero_point, packed.scale.shape)
    codes = unpack(packed.words, weight.shape)
    expected = relative(weight, dequantize(codes, packed.scale.double(), zero, args))
    assert int4_error(weight, packed).relative == pytest.approx(expected, rel=1e-4)


def test_the_error_of_a_few_weights_by_hand():
    """Codes 7 and 1 at a scale of 0.5 are 3.5 and 0.5: 0.5 and -0.25 away."""
    weight = torch.tensor([[3.0, 0.75, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    word = torch.tensor([[7 + 8 | (1 + 8) << 4] + [0x88] * 3], dtype=torch.uint8).view(torch.int32)
    found = int4_error(weight, Packed(word, torch.tensor([[0.5]]), None))
    assert found == SquaredError(0.3125, 9.5625)
    assert SquaredError.total([found, found]).relative == pytest.approx(0.1807754)


@pytest.mark.parametrize(("dtype", "block"), [(DTYPES[0], (128, 128)), (DTYPES[1], (1, None)), (DTYPES[2], (1, 32))])
def test_fp8_error_is_that_of_codes_times_scales(dtype, block):
    weight = (torch.randn(200, 320, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    packed = quantize_fp8(weight, block, "slime", "weight")
    scales = packed.scales.repeat_interleave(block[0], 0).repeat_interleave(block[1] or 320, 1)[:200, :320]
    expected = relative(weight, packed.codes.double() * scales)
    assert float_error(weight, packed, block).relative == pytest.approx(expected, rel=1e-4)


def test_e2m1_error_is_that_of_codes_times_scales():
    """Codes 7 (6.0) and 9 (-0.5) at an exponent of -1 (126): 3.0 and -0.25."""
    packed = Fp8Weight(torch.tensor([[7 | 9 << 4]], dtype=torch.uint8), torch.tensor([[126]], dtype=torch.uint8))
    assert float_error(torch.tensor([[2.5, 0.25]]), packed, (1, 2)) == SquaredError(0.5, 6.3125)
    exact = torch.tensor([[6.0, -0.5, 1.5, -3.0] * 8])
    assert float_error(exact, quantize_mxfp4(exact, "weight"), (1, 32)).error == 0


def test_zeros_have_no_error_and_squares_beyond_float32_no_number():
    assert SquaredError(0.0, 0.0).relative == 0
    weight = torch.full((1, 32), 1e30)
    (packed,) = quantize_pack([weight], QuantScheme(32, "minmax"), ["weight"])
    assert int4_error(weight, packed).relative is None
