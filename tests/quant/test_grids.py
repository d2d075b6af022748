"""Codes, scales and packed words, against compressed-tensors' own code and a formula worked through one weight at a time."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp

from ckptkit.errors import CkptkitError
from quant.grids import dequantize, quantize
from quant.packing import pack, unpack

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def weights(dtype: torch.dtype, columns: int = 256) -> torch.Tensor:
    """Rows of every kind that has broken a quantizer: random, zero, nearly zero, positive, negative, ties, huge, one outlier, -0."""
    torch.manual_seed(0)
    random = torch.randn(40, columns) * 0.02
    rows = [
        *random,
        torch.zeros(columns),
        -torch.zeros(columns),
        torch.full((columns,), 1e-6),
        random[0] * 1e-3,
        random[1].abs() + 1.0,
        -random[2].abs() - 1.0,
        torch.arange(columns) % 16 - 7.5,  # every tie between two codes of the /7.5 grid, at scale 1
        (torch.arange(columns) % 15 - 7) / 2 * 0.875,
        (torch.arange(columns) % 29 - 14) / 2,  # every tie of the /7 grid, at scale 1
        random[3] * 1e6,
        torch.cat([torch.tensor([100.0]), random[4][1:]]),
        torch.full((columns,), 0.3),
        torch.linspace(-1, 1, columns),
    ]
    return torch.stack([row.to(dtype) for row in rows])


def compressed_tensors_scheme(group_size: int) -> QuantizationScheme:
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group_size)
    return QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_minmax_is_what_compressed_tensors_writes(dtype: torch.dtype, group_size: int) -> None:
    weight = weights(dtype)
    scheme = compressed_tensors_scheme(group_size)
    expected_scale, zero_point = compute_dynamic_scales_and_zp(weight, scheme.weights, torch.nn.Linear(1, 1))
    expected = PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": expected_scale, "weight_zero_point": zero_point}, scheme)

    codes, scale = quantize(weight, group_size, "minmax")

    assert scale.dtype == dtype
    assert torch.equal(scale, expected["weight_scale"])
    assert torch.equal(pack(codes), expected["weight_packed"])
    assert codes.min() == -8
    assert codes.max() == 7


@pytest.mark.parametrize("grid", ["qmax7", "minmax"])
@pytest.mark.parametrize("group_size", [32, 128])
def test_compressed_tensors_unpacks_to_the_same_weights(grid: str, group_size: int) -> None:
    weight = weights(torch.bfloat16)
    codes, scale = quantize(weight, group_size, grid)  # type: ignore[arg-type]
    stored = {"weight_packed": pack(codes), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    read = PackedQuantizationCompressor.decompress(stored, compressed_tensors_scheme(group_size))["weight"]
    assert torch.equal(dequantize(codes, scale), read)
    # Half a step, and for minmax the largest weight, which the grid cannot reach; plus one rounding of the bf16 product and scale.
    step = scale.float().repeat_interleave(group_size, 1)
    assert ((weight.float() - read.float()).abs() <= step * (0.54 if grid == "qmax7" else 0.6)).all()


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def slow_qmax7(weight: torch.Tensor, group_size: int) -> tuple[list[list[int]], list[list[float]]]:
    """One weight at a time, rounding every operation to float32 by hand. A float64 quotient of float32s rounds to the same float32."""
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


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_qmax7_follows_the_formula(dtype: torch.dtype, group_size: int) -> None:
    weight = weights(dtype)
    expected_codes, expected_scales = slow_qmax7(weight, group_size)
    codes, scale = quantize(weight, group_size, "qmax7")
    assert codes.tolist() == expected_codes
    assert scale.dtype == dtype
    assert torch.equal(scale, torch.tensor(expected_scales, dtype=torch.float32).to(dtype))
    assert codes.abs().max() == 7


def test_qmax7_by_hand() -> None:
    row = torch.zeros(1, 32, dtype=torch.bfloat16)
    row[0, :5] = torch.tensor([7.0, -7.0, 1.5, 2.5, -0.5])
    codes, scale = quantize(row, 32, "qmax7")
    assert scale.tolist() == [[1.0]]
    assert codes[0, :6].tolist() == [7, -7, 2, 2, 0, 0]


def test_minmax_by_hand() -> None:
    row = torch.zeros(1, 32, dtype=torch.bfloat16)
    row[0, :5] = torch.tensor([7.5, -7.5, 1.5, 2.5, -0.5])
    codes, scale = quantize(row, 32, "minmax")
    assert scale.tolist() == [[1.0]]
    assert codes[0, :6].tolist() == [7, -8, 2, 2, 0, 0]


def test_qmax7_does_not_change_what_is_on_its_grid_already() -> None:
    codes, scale = quantize(weights(torch.bfloat16)[:40], 32, "qmax7")
    again, _ = quantize(dequantize(codes, scale), 32, "qmax7")
    assert torch.equal(codes, again)


@pytest.mark.parametrize("grid", ["qmax7", "minmax"])
def test_a_large_matrix_is_quantized_row_by_row_alike(grid: str) -> None:
    torch.manual_seed(1)
    weight = torch.randn(1100, 1024, dtype=torch.bfloat16)  # more than one block, the last one not full
    codes, scale = quantize(weight, 32, grid)  # type: ignore[arg-type]
    for start in range(0, 1100, 100):
        part_codes, part_scale = quantize(weight[start : start + 100], 32, grid)  # type: ignore[arg-type]
        assert torch.equal(codes[start : start + 100], part_codes)
        assert torch.equal(scale[start : start + 100], part_scale)


def test_packing_is_that_of_compressed_tensors() -> None:
    torch.manual_seed(2)
    codes = torch.randint(-8, 8, (33, 160), dtype=torch.int8)
    packed = pack(codes)
    assert torch.equal(packed, pack_to_int32(codes, 4))
    assert torch.equal(unpack(packed, [33, 160]), codes)


def test_packing_by_hand() -> None:
    # -8 is nibble 0, 7 is nibble 15; the first code of eight is the lowest nibble.
    codes = torch.tensor([[-7, -6, -5, -4, -3, -2, -1, 0], [7, -8, -8, -8, -8, -8, -8, 7]], dtype=torch.int8)
    assert [word & 0xFFFFFFFF for word in pack(codes).flatten().tolist()] == [0x87654321, 0xF000000F]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("grid", ["qmax7", "minmax"])
def test_refuses_what_is_not_finite(grid: str, value: float) -> None:
    weight = torch.ones(8, 64, dtype=torch.bfloat16)
    weight[7, 63] = value
    with pytest.raises(CkptkitError, match=r"layers\.0\.q holds NaN or infinity"):
        quantize(weight, 32, grid, "layers.0.q")  # type: ignore[arg-type]


def test_refuses_columns_that_do_not_divide() -> None:
    with pytest.raises(CkptkitError, match=r"layers\.0\.q: 96 input features do not divide into groups of 64"):
        quantize(torch.ones(8, 96), 64, "qmax7", "layers.0.q")
