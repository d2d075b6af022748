"""The CPU kernel, compiled by Numba: from the bits of weights to scales and INT4 codes, one small block at a time.

Each loop goes over neighbours, reads some arrays and writes others, so that LLVM turns it into vector instructions.
That is why the largest weight of every group is found by halving a whole block several times, and not by a short loop
a group. Weights are compared as integers that order as the floats do. So NaN needs no rule, and whatever is not finite
lies beyond the bits of infinity.

It runs at 0.7 to 1.3 times the speed of instructions written by hand with llvmlite (docs/int4.md, "Speed").
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir

from ckptkit.core.isolation import refuse_numba_settings
from quant.formats.scheme import Grid

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
_SEVENTH, _SMALLEST_QMAX7_SCALE, _INFINITY = _F32(1 / 7), _F32(1e-5), _F32(np.inf)

_OPTIONS = {"nogil": True, "error_model": "numpy"}
inlined = njit(**_OPTIONS, forceinline=True)


class _Variant(NamedTuple):
    """What the code is compiled for. `quotient`: the kind that a weight divided by its scale is rounded to."""

    weight: int
    scale: int
    quotient: int
    qmax7: bool
    symmetric: bool
    infinity: int  # bits of the weight's
    eps: np.float32  # of the scale's dtype, which stands for a scale of zero


@cache
def kernel(weight: torch.dtype, scale: torch.dtype, grid: Grid, symmetric: bool) -> Callable[..., bool]:
    """The function `quantize(weights, words, scales, zero points, first, last, size)`, compiled at its first call.

    It quantizes groups `first` to `last` of `size` neighbouring weights each. Weights and scales are int16 or int32,
    the bits of their floats; words uint8, half as many as weights; zero points int8, unused on a symmetric grid.
    Returns whether a weight or a scale is not finite.
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
    """The bits of a float32 that is `rounded` to a kind already."""
    if kind == _FLOAT16:
        return np.int32(_float_to_half(_F32(x)))
    bits = _F32(x).view(np.int32)
    return np.int32(bits >> 16 if kind == _BFLOAT16 else bits)


@inlined
def rounded(x: Any, kind: int) -> Any:
    """A float32 rounded, half to even, to what a kind can hold; still a float32."""
    if kind == _FLOAT16:
        return _half_to_float(_float_to_half(_F32(x)))
    if kind == _BFLOAT16:
        bits = _F32(x).view(np.int32)
        return np.int32((bits + ((bits >> 16) & 1) + 0x7FFF) & -0x10000).view(np.float32)
    return _F32(x)


@inlined
def _key(bits: Any, kind: int, symmetric: bool) -> Any:
    """Integers that order as these floats, or as their absolute values; keys of keys are the bits again."""
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
    """Scales and zero points, as stored and as `_codes` takes them. Returns whether something is not finite."""
    bad: Any = False
    for group in range(scales.size):
        top: Any = max(np.int64(high[group]), 0)
        bad |= top >= variant.infinity
        most = from_bits(top, variant.weight)
        if variant.qmax7:
            scale = max(_F32(most * _SEVENTH), _SMALLEST_QMAX7_SCALE)
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
