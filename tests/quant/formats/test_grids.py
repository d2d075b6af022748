"""Codes, scales and zero points, against compressed-tensors' own code and formulas applied weight by weight."""

import math
import struct

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization.lifecycle import fake_quantize as ct_fake_quantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from support.quant_weights import DTYPES, ct_packed, ct_scheme, hard_weights

from ckptkit.quant.formats.grids import dequantize, quantize
from ckptkit.quant.formats.packing import pack, pack_zero_point, unpack, unpack_zero_point
from ckptkit.quant.formats.scheme import QuantScheme


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_minmax_is_what_compressed_tensors_writes(dtype, symmetric):
    for group_size, stored in [*((size, None) for size in (32, 64, 128, None)), *((32, one) for one in DTYPES)]:
        weight = hard_weights(dtype)[: None if stored is None else -1]
        scheme = QuantScheme(group_size, "minmax", (), symmetric, scale_dtype=stored)
        expected = ct_packed(weight, scheme)
        codes, scale, zero_point = quantize(weight, scheme)
        assert scale.dtype == (stored or dtype)
        assert torch.equal(scale, expected["weight_scale"])
        assert torch.equal(pack(codes), expected["weight_packed"])
        assert (codes.min(), codes.max()) == (-8, 7)
        assert (zero_point is None) == ("weight_zero_point" not in expected) == symmetric
        if zero_point is not None:
            assert torch.equal(pack_zero_point(zero_point), expected["weight_zero_point"])
            assert (zero_point.min(), zero_point.max()) == (-8, 7)


SCHEMES = [QuantScheme(32, "qmax7"), QuantScheme(128, "minmax"), QuantScheme(64, "minmax", (), False)]


@pytest.mark.parametrize("scheme", [*SCHEMES, QuantScheme(None, "minmax")])
def test_compressed_tensors_unpacks_to_the_same_weights(scheme):
    weight = hard_weights(torch.bfloat16)[:-1]
    codes, scale, zero_point = quantize(weight, scheme)
    stored = {"weight_packed": pack(codes), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    if zero_point is not None:
        stored["weight_zero_point"] = pack_zero_point(zero_point)
    read = PackedQuantizationCompressor.decompress(stored, ct_scheme(scheme))["weight"]
    assert torch.equal(dequantize(codes, scale, zero_point), read)
    # Half a step, and for minmax the largest weight, which the grid cannot reach; plus the roundings to bf16.
    step = scale.float().repeat_interleave(scheme.group_size or weight.shape[1], 1)
    normal = weight.abs().amax(1) > 1e-30  # a subnormal scale has a few bits only
    error = (weight.float() - read.float()).abs()
    assert (error <= step * (0.54 if scheme.grid == "qmax7" else 0.6 if scheme.symmetric else 0.69))[normal].all()


def _float32(value):
    return float(struct.unpack("f", struct.pack("f", value))[0])


def slow_qmax7(weight, group_size):
    """Quantizes weight by weight, rounding each result to float32; from a float64 quotient that gives the same."""
    codes, scales = [], []
    for row in weight.tolist():
        codes.append([])
        scales.append([])
        for start in range(0, len(row), group_size):
            group = row[start : start + group_size]
            scale = max(_float32(max(map(abs, group)) * _float32(1 / 7)), _float32(1e-5))
            scales[-1].append(scale)
            codes[-1].extend(round(_float32(value / scale)) for value in group)  # Python rounds half to even
    return codes, scales


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_qmax7_follows_the_formula(dtype):
    weight = hard_weights(dtype)
    for group_size in (32, 64, 128, None):
        expected_codes, expected_scales = slow_qmax7(weight, group_size or weight.shape[1])
        for stored in [None, torch.float32]:
            codes, scale, zero_point = quantize(weight, QuantScheme(group_size, "qmax7", scale_dtype=stored))
            assert zero_point is None
            assert codes.tolist() == expected_codes
            assert torch.equal(scale, torch.tensor(expected_scales, dtype=torch.float32).to(stored or dtype))
            assert codes.abs().max() == 7


def test_what_has_no_range():
    """Groups of zeros have scale epsilon (minmax) or 1e-5 (qmax7) and codes 0; too small a group becomes zeros."""
    zeros = torch.zeros(1, 32, dtype=torch.bfloat16)
    found = [one.tolist() for one in quantize(zeros, QuantScheme(32, "minmax", (), symmetric=False))]
    assert found == [[[0] * 32], [[0.0078125]], [[0]]]
    assert quantize(zeros, QuantScheme(32, "minmax")).scale.tolist() == [[0.0078125]]
    assert quantize(zeros, QuantScheme(32, "qmax7")).scale.tolist() == [[float(torch.tensor(1e-5).bfloat16())]]
    tiny = torch.full((1, 32), 1e-40, dtype=torch.bfloat16)
    for scheme in [QuantScheme(32, "minmax"), QuantScheme(32, "qmax7")]:
        codes, scale, _ = quantize(tiny, scheme)
        assert (dequantize(codes, scale).abs() <= 2e-40).all()


def slow_search(group, scheme):
    """Scale and error of the best of twenty ranges, by compressed-tensors' own scales and its own rounding."""
    args = ct_scheme(QuantScheme(None, "minmax", (), scheme.symmetric)).weights
    best = (math.nan, math.inf)
    for step in range(20):
        low, high = group.amin(-1, keepdim=True) * (1 - step / 100), group.amax(-1, keepdim=True) * (1 - step / 100)
        scale, zero_point = calculate_qparams(low, high, args)
        rounded = ct_fake_quantize(group, scale, zero_point, args)[0].tolist()
        error = sum(abs(one - other) ** 2.4 for one, other in zip(rounded, group[0].tolist(), strict=True))
        if error < best[1]:
            best = float(scale), error
    return best


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_search_finds_what_trying_every_range_finds(dtype, symmetric):
    weight, scheme = hard_weights(dtype)[::6], QuantScheme(64, "minmax", (), symmetric, "mse")
    codes, scale, zero_point = quantize(weight, scheme)
    found = [slow_search(group.reshape(1, -1), scheme) for group in weight.reshape(-1, 64)]
    assert scale.flatten().tolist() == [one[0] for one in found]
    plain = quantize(weight, QuantScheme(64, "minmax", (), symmetric))
    assert not torch.equal(scale, plain.scale)
    both = [dequantize(*one).double() for one in ((codes, scale, zero_point), plain)]
    errors = [(one - weight.double()).abs().pow(2.4).sum() for one in both]
    assert errors[0] < errors[1]


def test_packing_is_that_of_compressed_tensors():
    torch.manual_seed(2)
    codes = torch.randint(-8, 8, (33, 160), dtype=torch.int8)
    packed = pack(codes)
    assert torch.equal(packed, pack_to_int32(codes, 4))
    assert torch.equal(unpack(packed, [33, 160]), codes)
    along_rows = pack_zero_point(codes)
    assert torch.equal(along_rows, pack_to_int32(codes, 4, packed_dim=0))
    assert torch.equal(unpack_zero_point(along_rows, [33, 160]), codes)
    assert torch.equal(
        unpack(pack_to_int32(codes[:, :155], 4), [33, 155]), unpack_from_int32(packed, 4, torch.Size([33, 155]))
    )
