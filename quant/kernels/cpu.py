"""The CPU kernels, compiled by Numba: INT4 codes and scales, and codes of float8_e4m3fn and E2M1, on all cores.

Each loop goes over neighbours, reads some arrays and writes others, so that LLVM turns it into vector instructions.
Therefore the largest weight of every group is found by halving a complete block several times, and not by a short loop
for each group. Weights are compared as integers of the same order: NaN needs no rule, and non-finite numbers are beyond
the bits of infinity. A code of a float is rounded half to even by integer arithmetic on the bits of a float32.

INT4 runs at 0.7 to 1.3 times the speed of hand-written llvmlite instructions. The first call for a
combination of dtypes and formula compiles a kernel in seconds; later processes load it from Numba's cache on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from ckptkit.core.isolation import refuse_numba_settings
from ckptkit.quant.formats.grids import SMALLEST_QMAX7_SCALE, not_finite
from ckptkit.quant.formats.packing import CODES_PER_WORD, Packed, pack_zero_point
from ckptkit.quant.formats.scheme import Grid, QuantScheme
from ckptkit.quant.kernels.threads import TASK, bits_of, on_all_cores

refuse_numba_settings()
from numba import njit, types  # noqa: E402
from numba.extending import intrinsic  # noqa: E402

_BLOCK = 1024  # weights, unless a row is longer
_TILE, _HALF = 64, 32  # weights encoded together; the smallest group is half of them
_LONG = 256  # neighbours from which on a loop over them is as fast as halving
FLOAT32, _BFLOAT16, _FLOAT16 = range(3)
KINDS = {torch.float32: FLOAT32, torch.bfloat16: _BFLOAT16, torch.float16: _FLOAT16}
_INFINITIES = (0x7F800000, 0x7F80, 0x7C00)

_F32 = np.float32
# 1.5 * 2**23: added to a small float32, it rounds it half to even and leaves the integer in the lowest bits.
_ROUNDS, _ROUNDS_CODE = _F32(12582912), _F32(12582912 + 8)
_SEVENTH, _SMALLEST_SCALE, _INFINITY = _F32(1 / 7), _F32(SMALLEST_QMAX7_SCALE), _F32(np.inf)

_OPTIONS = {"nogil": True, "error_model": "numpy"}
inlined = njit(**_OPTIONS, forceinline=True)


class _Variant(NamedTuple):
    """The constants of compiled code."""

    weight: int
    scale: int
    quotient: int  # the kind to which a weight divided by its scale is rounded
    qmax7: bool
    symmetric: bool
    infinity: int  # bits in the weight's kind
    eps: np.float32  # of the scale's dtype, instead of a scale of zero


@cache
def kernel(weight: torch.dtype, scale: torch.dtype, grid: Grid, symmetric: bool) -> Callable[..., bool]:
    """The function `quantize(weights, words, scales, zero points, first, last, size)`, compiled at its first call.

    It quantizes groups `first` to `last` of `size` neighbouring weights each. Weights and scales are the int16 or int32
    bits of their floats; words are uint8, one for two weights; zero points int8, unused on a symmetric grid. Returns
    whether a weight or a scale is not finite.
    """
    quotient = torch.float32 if grid == "qmax7" else torch.promote_types(weight, scale)
    kinds = KINDS[weight], KINDS[scale], KINDS[quotient]
    variant = _Variant(*kinds, grid == "qmax7", symmetric, _INFINITIES[kinds[0]], _F32(torch.finfo(scale).eps))

    def quantize(weights: Any, words: Any, scales: Any, zeros: Any, first: int, last: int, size: int) -> bool:
        bad = False
        step = max(1, _BLOCK // size)
        kind, absolute = variant.weight, variant.symmetric
        keys, spare = np.empty(_BLOCK, weights.dtype), np.empty(_BLOCK, weights.dtype)
        low_keys, low_spare = np.empty(_BLOCK, weights.dtype), np.empty(_BLOCK, weights.dtype)
        codes = np.empty(step * size, np.uint8)
        divisors, offsets = np.zeros(step, np.float32), np.zeros(step, np.float32)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            block = weights[begin * size : end * size]
            high = _maxima(block, keys, spare, size, kind, absolute, 0)
            low = high if absolute else _maxima(block, low_keys, low_spare, size, kind, False, -1)
            bad |= _scales(low, high, scales[begin:end], zeros[begin:end], divisors, offsets, variant)
            _codes(block, divisors, offsets, codes, size, variant)
            _pack(codes, words[begin * size // 2 : end * size // 2])
        return bad

    return compiled(quantize)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compiles a function at its first call, and keeps the code on disk for later processes."""
    try:
        kept: Callable[..., Any] = njit(**_OPTIONS, **options, cache=True)(function)
    except RuntimeError:  # neither this folder nor the user's cache can be written
        kept = njit(**_OPTIONS, **options)(function)
    return kept


@intrinsic
def _half_to_float(context: Any, bits: Any) -> Any:
    def generate(context: Any, code: Any, signature: Any, args: Any) -> Any:
        return code.fpext(code.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), generate


@intrinsic
def _float_to_half(context: Any, x: Any) -> Any:
    def generate(context: Any, code: Any, signature: Any, args: Any) -> Any:
        return code.bitcast(code.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), generate


@inlined
def from_bits(bits: Any, kind: int) -> Any:
    """The float32 that the bits of a kind mean."""
    if kind == _FLOAT16:
        return _half_to_float(np.int16(bits))
    return np.int32(bits << 16 if kind == _BFLOAT16 else bits).view(np.float32)


@inlined
def _bits(x: Any, kind: int) -> Any:
    """The bits of a float32 that is already `rounded` to a kind."""
    if kind == _FLOAT16:
        return np.int32(_float_to_half(_F32(x)))
    bits = _F32(x).view(np.int32)
    return np.int32(bits >> 16 if kind == _BFLOAT16 else bits)


@inlined
def rounded(x: Any, kind: int) -> Any:
    """A float32 rounded half to even to a number of a kind, as float32."""
    if kind == _FLOAT16:
        return _half_to_float(_float_to_half(_F32(x)))
    if kind == _BFLOAT16:
        bits = _F32(x).view(np.int32)
        return np.int32((bits + ((bits >> 16) & 1) + 0x7FFF) & -0x10000).view(np.float32)
    return _F32(x)


@inlined
def _key(bits: Any, kind: int, symmetric: bool) -> Any:
    """Integers in the order of these floats, or of their absolute values; keys of keys are the bits again."""
    sign, magnitude = (31, 0x7FFFFFFF) if kind == FLOAT32 else (15, 0x7FFF)
    return bits & magnitude if symmetric else bits ^ ((bits >> sign) & magnitude)


@inlined
def _maxima(weights: Any, keys: Any, spare: Any, size: int, kind: int, absolute: bool, flip: int) -> Any:
    """The largest key of every `size` weights, in one of the arrays; with `flip` -1 the complement of the smallest."""
    if size >= _LONG:
        for group in range(weights.size // size):
            largest = keys.dtype.type(_key(weights[group * size], kind, absolute) ^ flip)
            for at in range(np.uint64(group * size), np.uint64(group * size + size)):
                largest = max(largest, keys.dtype.type(_key(weights[at], kind, absolute) ^ flip))
            keys[group] = largest
        return keys
    for at in range(weights.size // 2):
        left = keys.dtype.type(_key(weights[2 * at], kind, absolute) ^ flip)
        right = keys.dtype.type(_key(weights[2 * at + 1], kind, absolute) ^ flip)
        keys[at] = max(left, right)
    keys, size = keys[: weights.size // 2], size // 2
    while size % 2 == 0:
        _halve(keys, spare)
        keys, spare, size = spare[: keys.size // 2], keys, size // 2
    for group in range(keys.size // size if size > 1 else 0):
        keys[group] = keys[group * size : (group + 1) * size].max()
    return keys


@njit(**_OPTIONS)
def _halve(keys: Any, half: Any) -> None:
    for at in range(keys.size // 2):
        half[at] = max(keys[2 * at], keys[2 * at + 1])


@inlined
def _scales(low: Any, high: Any, scales: Any, zeros: Any, divisors: Any, offsets: Any, variant: _Variant) -> Any:
    """Stores scales and zero points, also in the form for `_codes`. Returns whether a number is not finite."""
    bad: Any = False
    for group in range(scales.size):
        top: Any = max(np.int64(high[group]), 0)
        bad |= top >= variant.infinity
        most = from_bits(top, variant.weight)
        if variant.qmax7:
            scale = max(_F32(most * _SEVENTH), _SMALLEST_SCALE)
        elif variant.symmetric:
            scale = rounded(most / _F32(7.5), variant.weight)
        else:  # every operation rounded to the weight's dtype
            bottom: Any = min(~np.int64(low[group]), 0)
            bad |= ~bottom >= variant.infinity
            least = from_bits(_key(bottom, variant.weight, False), variant.weight)
            scale = rounded(rounded(most - least, variant.weight) / _F32(15), variant.weight)
            zero = rounded(_F32(-8) - rounded(least / scale, variant.weight), variant.weight)
            none = zero != zero  # 0 / 0: no range, no zero point
            zero = _F32(_clamped(zero) + _ROUNDS) - _ROUNDS
            offsets[group] = _F32(0) if none else zero
            zeros[group] = np.int8(offsets[group])
        stored = rounded(scale, variant.scale)
        stored = variant.eps if stored == _F32(0) else stored
        bad |= stored >= _INFINITY
        scales[group] = _bits(stored, variant.scale)
        divisors[group] = scale if variant.qmax7 else stored
    return bad


@inlined
def _codes(weights: Any, divisors: Any, offsets: Any, codes: Any, size: int, variant: _Variant) -> None:
    """A byte for each weight: its code + 8."""
    done = 0
    if size < _LONG and size % _HALF == 0:
        done = weights.size // _TILE * _TILE
        for begin in range(0, done, _TILE):
            left, right = begin // size, (begin + _HALF) // size
            scale, other_scale, zero, other_zero = divisors[left], divisors[right], offsets[left], offsets[right]
            for lane in range(np.uint64(_TILE)):
                at, first = np.uint64(begin) + lane, lane < np.uint64(_HALF)
                codes[at] = _code(weights[at], scale if first else other_scale, zero if first else other_zero, variant)
    for begin in range(done // size * size, weights.size, size):
        scale, zero = divisors[begin // size], offsets[begin // size]
        for place in range(np.uint64(begin), np.uint64(begin + size)):
            codes[place] = _code(weights[place], scale, zero, variant)


@inlined
def _code(bits: Any, divisor: Any, offset: Any, variant: _Variant) -> Any:
    x = rounded(from_bits(bits, variant.weight) / divisor, variant.quotient)
    if not variant.symmetric:
        x = rounded(x + offset, variant.quotient)
    return np.uint8(_F32(_clamped(x) + _ROUNDS_CODE).view(np.int32))


@inlined
def _clamped(x: Any) -> Any:
    x = x if x < _F32(7) else _F32(7)
    return x if x > _F32(-8) else _F32(-8)


@njit(**_OPTIONS)
def _pack(codes: Any, words: Any) -> None:
    for at in range(words.size):
        words[at] = codes[2 * at] | codes[2 * at + 1] << 4


_I32 = np.int32
_LARGEST = _I32(0x43E00000)  # 448, as bits
_SMALLEST_NORMAL = _I32(0x3C800000)  # 2^-6: smaller numbers are multiples of 2^-9
_ROUNDS_8 = _F32(1 << 14)  # added to a number below 2^-6, leaves multiples of 2^-9 in the lowest bits
_BIAS = _I32((127 - 7) << 3)  # between the exponents of float32 and float8_e4m3fn
_LARGEST_4 = _I32(0x40C00000)  # 6, as bits
_ONE = _I32(0x3F800000)  # the smallest normal number of E2M1: smaller ones are multiples of 0.5
_ROUNDS_4 = _F32(1 << 22)  # added to a number below 1, leaves multiples of 0.5 in the lowest bits
_BIAS_4 = _I32((127 - 1) << 1)  # between the exponents of float32 and E2M1


@cache
def largest_kernel(weight: torch.dtype) -> Callable[..., None]:
    """The function `largest(weights, most, height, width)`: the largest absolute value of each block.

    `weights` [rows, columns] and `most` [blocks down, blocks across], initially zeros, are int16 or int32, the bits of
    floats. A non-finite weight gives a non-finite result.
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

    It multiplies weights by float32 `factors` [blocks down, blocks across], or `divides` by them, and rounds to
    `quotient` and then to a code. `stored` [rows, columns] are uint8: codes of E2M1 if `four_bit`, else of
    float8_e4m3fn. `narrow`: a constant width that divides the columns, twice as fast for few neighbours; 0: any width.
    """
    kind, quotient_kind = KINDS[weight], KINDS[quotient]
    encode = _code_e2m1 if four_bit else _code_e4m3

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


@inlined
def _code_e4m3(x: Any) -> Any:
    bits = _F32(x).view(_I32)
    magnitude = _I32(min(_I32(bits & 0x7FFFFFFF), _LARGEST))
    normal = _I32(((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - _BIAS)
    small = _I32(_F32(_I32(magnitude).view(_F32) + _ROUNDS_8).view(_I32) & 0xF)
    return np.uint8((normal if magnitude >= _SMALLEST_NORMAL else small) | ((bits >> 24) & 0x80))


@inlined
def _code_e2m1(x: Any) -> Any:
    # A negative number that becomes zero keeps its sign; -0 does not.
    bits = _F32(x).view(_I32)
    magnitude = _I32(min(_I32(bits & 0x7FFFFFFF), _LARGEST_4))
    normal = _I32(((magnitude + 0x1FFFFF + ((magnitude >> 22) & 1)) >> 22) - _BIAS_4)
    small = _I32(_F32(_I32(magnitude).view(_F32) + _ROUNDS_4).view(_I32) & 0x3)
    return np.uint8((normal if magnitude >= _ONE else small) | (8 if x < 0 else 0))


def quantize_pack_cpu(weights: Sequence[Tensor], scheme: QuantScheme, names: Sequence[str]) -> list[Packed]:
    """Implements `dispatch.quantize_pack` in memory without a search; cores and callers share large matrices."""
    jobs = [_Job(weight, scheme) for weight in weights]
    tasks = [(job, first, last) for job in jobs for first, last in job.tasks()]
    results = on_all_cores(lambda task: task[0].run(*task[1:]), tasks)
    bad = {job for (job, *_), is_bad in zip(tasks, results, strict=True) if is_bad}
    for job, name in zip(jobs, names, strict=True):
        if job in bad:
            raise not_finite(job.weight, job.scale.dtype, name)
    return [job.packed() for job in jobs]


class _Job:
    """One matrix and its packed parts."""

    def __init__(self, weight: Tensor, scheme: QuantScheme) -> None:
        rows, columns = weight.shape
        dtype, groups = scheme.scale_dtype or weight.dtype, scheme.groups(columns)
        self.weight = weight.detach().contiguous()
        self.words = torch.empty(rows, columns // CODES_PER_WORD, dtype=torch.int32)
        self.scale = torch.full((rows, groups), torch.finfo(dtype).eps, dtype=dtype)  # of a matrix without columns
        self.zero_point = None if scheme.symmetric else torch.zeros(rows, groups, dtype=torch.int8)
        self.size = scheme.group_size or columns
        self.kernel = kernel(weight.dtype, dtype, scheme.grid, scheme.symmetric)

    def tasks(self) -> Iterator[tuple[int, int]]:
        """Yields the first and last group of each part."""
        step = max(1, TASK // max(self.size, 1))
        groups = self.scale.numel() if self.size else 0
        return ((first, min(first + step, groups)) for first in range(0, groups, step))

    def run(self, first: int, last: int) -> bool:
        """Quantizes these groups. Returns whether a weight or a scale is not finite."""
        zeros = torch.empty(0, dtype=torch.int8) if self.zero_point is None else self.zero_point
        arrays = (bits_of(self.weight), self.words.view(torch.uint8), bits_of(self.scale), zeros)
        return self.kernel(*(array.flatten().numpy() for array in arrays), first, last, self.size)

    def packed(self) -> Packed:
        return Packed(self.words, self.scale, None if self.zero_point is None else pack_zero_point(self.zero_point))
