"""The CPU kernels for float8_e4m3fn and E2M1, compiled by Numba: the largest weight of each block, and each code.

A code is rounded half to even by integer arithmetic on the bits of a float32, so that LLVM turns the loops into vector
instructions; torch converts one number at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from quant.kernels.cpu_kernel import FLOAT32, KINDS, compiled, from_bits, inlined, rounded

_F32, _I32 = np.float32, np.int32
_LARGEST = _I32(0x43E00000)  # 448, as bits
_SMALLEST_NORMAL = _I32(0x3C800000)  # 2^-6: smaller numbers are multiples of 2^-9
_ROUNDS = _F32(1 << 14)  # added to a number below 2^-6, it leaves multiples of 2^-9 in the lowest bits
_BIAS = _I32((127 - 7) << 3)  # between the exponents of float32 and float8_e4m3fn
_LARGEST_4 = _I32(0x40C00000)  # 6, as bits
_ONE = _I32(0x3F800000)  # the smallest normal number of E2M1: smaller ones are multiples of 0.5
_ROUNDS_4 = _F32(1 << 22)  # added to a number below 1, it leaves multiples of 0.5 in the lowest bits
_BIAS_4 = _I32((127 - 1) << 1)  # between the exponents of float32 and E2M1


@cache
def largest_kernel(weight: torch.dtype) -> Callable[..., None]:
    """The function `largest(weights, most, height, width)`: the largest absolute value of each block.

    `weights` [rows, columns] are int16 or int32, the bits of their floats, as are `most` [blocks down, blocks across],
    which begin as zeros. Whatever is not finite gives bits that are not.
    """
    magnitude = 0x7FFFFFFF if KINDS[weight] == FLOAT32 else 0x7FFF

    def largest(weights: Any, most: Any, height: int, width: int) -> None:
        rows, columns = weights.shape
        keys = np.empty(columns, weights.dtype)
        for down in range(most.shape[0]):
            first = down * height
            for column in range(columns):
                keys[column] = weights.dtype.type(weights[first, column] & magnitude)
            for row in range(first + 1, min(first + height, rows)):
                for column in range(columns):
                    keys[column] = max(keys[column], weights.dtype.type(weights[row, column] & magnitude))
            for across in range(most.shape[1]):
                begin = across * width
                top = keys[begin]
                for column in range(np.uint64(begin), np.uint64(min(begin + width, columns))):
                    top = max(top, keys[column])
                most[down, across] = top

    return compiled(largest)


@cache
def codes_kernel(
    weight: torch.dtype, quotient: torch.dtype, divides: bool, four_bit: bool, narrow: int = 0
) -> Callable[..., None]:
    """The function `codes(weights, factors, stored, height, width)`: the code of each weight.

    `factors` [blocks down, blocks across] are float32 that a weight is multiplied by, or divided by if it `divides`.
    The result is rounded to `quotient` before it is rounded to a code. `stored` [rows, columns] are uint8: codes of
    E2M1 if they have `four_bit`, else of float8_e4m3fn. `narrow`: the width that it is compiled for, which divides the
    columns, and which makes a loop over few neighbours twice as fast; 0: any.
    """
    kind, quotient_kind = KINDS[weight], KINDS[quotient]
    encode = _code_4 if four_bit else _code

    def codes(weights: Any, factors: Any, stored: Any, height: int, width: int) -> None:
        rows, columns = weights.shape
        for row in range(rows):
            for across in range(factors.shape[1]):
                factor = factors[row // height, across]
                begin, end = across * width, min(across * width + width, columns)
                some, target = weights[row, begin:end], stored[row, begin:end]
                for at in range(narrow) if narrow else range(np.uint64(0), np.uint64(end - begin)):
                    number = from_bits(some[at], kind)
                    x = number / factor if divides else number * factor
                    target[at] = encode(rounded(x, quotient_kind))

    return compiled(codes)


@inlined  # type: ignore[untyped-decorator]
def _code(x: Any) -> Any:
    bits = _F32(x).view(_I32)
    magnitude = _I32(min(_I32(bits & 0x7FFFFFFF), _LARGEST))
    normal = _I32(((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - _BIAS)
    small = _I32(_F32(_I32(magnitude).view(_F32) + _ROUNDS).view(_I32) & 0xF)
    return np.uint8((normal if magnitude >= _SMALLEST_NORMAL else small) | ((bits >> 24) & 0x80))


@inlined  # type: ignore[untyped-decorator]
def _code_4(x: Any) -> Any:
    # A negative number that becomes zero keeps its sign; -0 does not.
    bits = _F32(x).view(_I32)
    magnitude = _I32(min(_I32(bits & 0x7FFFFFFF), _LARGEST_4))
    normal = _I32(((magnitude + 0x1FFFFF + ((magnitude >> 22) & 1)) >> 22) - _BIAS_4)
    small = _I32(_F32(_I32(magnitude).view(_F32) + _ROUNDS_4).view(_I32) & 0x3)
    return np.uint8((normal if magnitude >= _ONE else small) | (8 if x < 0 else 0))
