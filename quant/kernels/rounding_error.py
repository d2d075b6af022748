"""Measures the rounding error of packed matrices: INT4, FP8, MXFP4 and NVFP4.

This runs right after a matrix is packed, while weights and codes are in memory. For INT4 it takes a quarter of a
nanosecond a weight, like packing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ckptkit.quant.formats.floats.decode import as_float, e4m3_values
from ckptkit.quant.formats.floats.layout import E2M1_NUMBERS
from ckptkit.quant.formats.packing import Packed, unpack_zero_point
from ckptkit.quant.kernels.float_roundings import Fp8Weight
from ckptkit.quant.schemes.interface import SquaredError

# Stored codes: INT4 and E2M1 two a byte, the even column in the low half.
_Codes = Literal["int4", "e2m1", "e4m3"]


def int4_error(weight: Tensor, packed: Packed) -> SquaredError:
    """The error of an INT4 matrix. Everything is on the CPU; numbers are multiplied by their scale in float32."""
    scale = packed.scale
    zeros = torch.zeros(scale.shape) if packed.zero_point is None else unpack_zero_point(packed.zero_point, scale.shape)
    block = (1, weight.shape[1] // max(scale.shape[1], 1))
    return _measured(weight, packed.words.view(torch.uint8), scale.float(), zeros.float(), block, "int4")


def float_error(weight: Tensor, packed: Fp8Weight, block: tuple[int, int | None]) -> SquaredError:
    """The error of a matrix in FP8 or E2M1; its `scales` are factors of codes, or exponents as uint8."""
    scales = as_float(packed.scales)
    codes: _Codes = "e2m1" if packed.codes.dtype == torch.uint8 else "e4m3"
    size = block[0], block[1] or max(weight.shape[1], 1)
    return _measured(weight, packed.codes.view(torch.uint8), scales, torch.zeros(scales.shape), size, codes)


def _measured(
    weight: Tensor, stored: Tensor, scales: Tensor, zeros: Tensor, block: tuple[int, int], codes: _Codes
) -> SquaredError:
    # Imported here, and below, because Numba takes a while.
    from ckptkit.quant.kernels.threads import bits_of, on_all_cores, row_tasks

    measure = _kernel(weight.dtype, codes)
    table = e4m3_values().numpy() if codes == "e4m3" else np.array(E2M1_NUMBERS, np.float32)  # of INT4 unused
    bits, bytes_, factors, offsets = (one.contiguous().numpy() for one in (bits_of(weight), stored, scales, zeros))

    def part(rows: slice) -> SquaredError:
        return SquaredError(*measure(bits, bytes_, factors, offsets, table, (rows.start, rows.stop), block))

    return SquaredError.total(on_all_cores(part, row_tasks(len(weight), weight.shape[1], block[0])))


@cache
def _kernel(weight: torch.dtype, codes: _Codes) -> Callable[..., tuple[float, float]]:
    """The function `measure(weights, codes, scales, zeros, table, (first row, last row), (height, width))`.

    Weights are the bits of their floats [rows, columns], codes uint8; scales and zeros float32 [blocks down, blocks
    across] of blocks of `height` rows and `width` columns. Sums are float32 within a row of a block, else float64.
    """
    from ckptkit.quant.kernels.cpu import KINDS, compiled, from_bits

    kind, in_pairs, linear = KINDS[weight], codes != "e4m3", codes == "int4"
    f32 = np.float32

    def measure(
        weights: Any, codes: Any, scales: Any, zeros: Any, table: Any, rows: tuple[int, int], block: tuple[int, int]
    ) -> tuple[float, float]:
        height, width = block
        error = norm = 0.0
        for row in range(rows[0], rows[1]):
            for across in range(scales.shape[1]):
                scale, zero = scales[row // height, across], zeros[row // height, across] + f32(8)
                begin, end = across * width, min(across * width + width, weights.shape[1])
                some = weights[row, begin:end]
                changed, squares = f32(0), f32(0)
                if in_pairs:
                    pairs = codes[row, begin // 2 : end // 2]
                    for at in range(np.uint64(0), np.uint64(pairs.size)):
                        left, right = from_bits(some[2 * at], kind), from_bits(some[2 * at + np.uint64(1)], kind)
                        low, high = pairs[at] & 15, pairs[at] >> 4
                        one = left - ((f32(low) - zero) if linear else table[low]) * scale
                        other = right - ((f32(high) - zero) if linear else table[high]) * scale
                        changed += one * one + other * other
                        squares += left * left + right * right
                else:
                    bytes_ = codes[row, begin:end]
                    for at in range(np.uint64(0), np.uint64(bytes_.size)):
                        number = from_bits(some[at], kind)
                        one = number - table[bytes_[at]] * scale
                        changed += one * one
                        squares += number * number
                error += np.float64(changed)
                norm += np.float64(squares)
        return error, norm

    return compiled(measure, fastmath={"reassoc", "contract", "nsz"})
