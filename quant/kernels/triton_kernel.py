"""Quantizes weights to INT4 words and scales on a GPU, hundreds of matrices a launch, in one read and one write.

The bytes are those of `quant.formats.grids` on the CPU. Divisions are therefore correctly rounded: multiplying by the
scale's reciprocal with Markstein's correction takes three operations a weight instead of about ten. Where `minmax`
rounds to the weight's dtype, so do these kernels. Adding `_MAGIC` to a float32 below 2**22 rounds it half to even and
leaves the integer in the lowest bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23
_MAGIC = tl.constexpr(12582912.0 + 8.0)  # and the 8 added to every code
_MAGIC_BITS = 0x4B400000
MAGIC_SUM = tl.constexpr(
    ((sum(_MAGIC_BITS << 4 * place for place in range(8)) + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)
)  # wrapped to int32
_SEVENTH = tl.constexpr(0.14285714924335479736328125)  # float32(1 / 7)
TINY = tl.constexpr(2.0**-64)  # reciprocals of smaller scales, and residuals, could leave float32's range
BOOST = tl.constexpr(2.0**80)


@triton.jit
def _larger(left, right):  # type: ignore[no-untyped-def]
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _smaller(left, right):  # type: ignore[no-untyped-def]
    return tl.minimum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scales_of(  # type: ignore[no-untyped-def]
    low, high, WEIGHT: tl.constexpr, STORED: tl.constexpr, EPS: tl.constexpr, MINMAX: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
):  # fmt: skip
    """Returns the scale to divide by and the zero point of each group, float32.

    `low` and `high`: the group's least weight or 0 and its largest or 0; when symmetric, `high` is absmax.
    """
    zero = high * 0
    if MINMAX:
        if ASYMMETRIC:
            scale = tl.div_rn((high - low).to(WEIGHT).to(tl.float32), 15.0).to(WEIGHT).to(tl.float32)
            zero = tl.div_rn(low, tl.where(scale == 0, 1.0, scale)).to(WEIGHT).to(tl.float32)
            zero = tl.clamp((-8.0 - zero).to(WEIGHT).to(tl.float32), -8.0, 7.0)
            zero = (zero + _ROUND) - _ROUND
            zero = tl.where(scale == 0, tl.where(low < 0, 7.0, 0.0), zero)
        else:
            scale = tl.div_rn(high, 7.5).to(WEIGHT).to(tl.float32)
        scale = scale.to(STORED).to(tl.float32)
        scale = tl.where(scale == 0, EPS, scale)
    else:
        scale = tl.maximum(high * _SEVENTH, 1e-5, propagate_nan=tl.PropagateNan.ALL)
    return scale, zero


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rounds float32 to DTYPE and returns it as float32."""
    if DTYPE == tl.bfloat16:
        # Two at a time: converting one at a time is eight times slower.
        pair: tl.constexpr = "{.reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000;}"
        return tl.inline_asm_elementwise(pair, "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def nibbles(x, scale, inverse, zero, WIDE: tl.constexpr, MINMAX: tl.constexpr, ASYMMETRIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns `_MAGIC_BITS` + 8 + code, int32, for every weight; scale, inverse and zero broadcast."""
    quotient = x * inverse
    quotient = tl.fma(tl.fma(-quotient, scale, x), inverse, quotient)
    if MINMAX:
        quotient = _rounded(quotient, WIDE)
        if ASYMMETRIC:
            quotient = _rounded(quotient + zero, WIDE)
        quotient = tl.clamp(quotient, -8.0, 7.0)
    return (quotient + _MAGIC).to(tl.int32, bitcast=True)


@triton.jit
def grouped(  # type: ignore[no-untyped-def]
    table, words, scales, zeros, bad, groups,
    WEIGHT: tl.constexpr, STORED: tl.constexpr, WIDE: tl.constexpr, EPS: tl.constexpr, MINMAX: tl.constexpr,
    ASYMMETRIC: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Quantizes TILE // GROUP groups (first grid axis) of one matrix of `groups` groups (second axis)."""
    BLOCK: tl.constexpr = TILE // GROUP
    WORDS: tl.constexpr = GROUP // 8
    matrix = tl.program_id(1)
    weight = tl.multiple_of(tl.load(table + matrix).to(tl.pointer_type(WEIGHT)), 16)
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = group < groups
    word = group[:, None].to(tl.int64) * WORDS + tl.arange(0, WORDS)[None, :]
    x = tl.load(weight + word[:, :, None] * 8 + tl.arange(0, 8)[None, None, :], mask=inside[:, None, None], other=0).to(
        tl.float32
    )
    if ASYMMETRIC:
        high = tl.maximum(tl.reduce(tl.reduce(x, 2, _larger), 1, _larger), 0.0, propagate_nan=tl.PropagateNan.ALL)
        low = tl.minimum(tl.reduce(tl.reduce(x, 2, _smaller), 1, _smaller), 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        high = tl.reduce(tl.reduce(tl.abs(x), 2, _larger), 1, _larger)
        low = high
    scale, zero = scales_of(low, high, WEIGHT, STORED, EPS, MINMAX, ASYMMETRIC)
    divisor = scale
    if MINMAX:
        if tl.min(scale, 0) < TINY:
            boost = tl.where(scale < TINY, BOOST, 1.0)
            divisor = scale * boost
            x = x * boost[:, None, None]
    inverse = tl.div_rn(1.0, divisor)
    first = matrix.to(tl.int64) * groups
    bits = nibbles(x, divisor[:, None, None], inverse[:, None, None], zero[:, None, None], WIDE, MINMAX, ASYMMETRIC)
    packed = tl.sum(bits << (4 * tl.arange(0, 8))[None, None, :], 2) - MAGIC_SUM
    tl.store(words + first * WORDS + word, packed, mask=inside[:, None])
    stored = scale.to(STORED)
    tl.store(scales + first + group, stored, mask=inside)
    tl.store(bad + matrix + group * 0, 1, mask=inside & ~(stored.to(tl.float32) < float("inf")))
    if ASYMMETRIC:
        tl.store(zeros + first + group, zero.to(tl.int8), mask=inside)


@triton.jit
def channelwise(  # type: ignore[no-untyped-def]
    table, words, scales, zeros, bad, rows, columns,
    WEIGHT: tl.constexpr, STORED: tl.constexpr, WIDE: tl.constexpr, EPS: tl.constexpr, MINMAX: tl.constexpr,
    ASYMMETRIC: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Quantizes one row (first grid axis) of one matrix (second axis). The second read of it comes from the cache."""
    matrix = tl.program_id(1)
    row = tl.program_id(0)
    place = (tl.arange(0, TILE // 8) * 8)[:, None] + tl.arange(0, 8)[None, :]
    weight = tl.multiple_of(tl.load(table + matrix).to(tl.pointer_type(WEIGHT)), 16) + row.to(tl.int64) * columns
    high = tl.zeros((TILE // 8, 8), tl.float32)
    low = tl.zeros((TILE // 8, 8), tl.float32)
    for start in range(0, columns, TILE):
        x = tl.load(weight + start + place, mask=start + place < columns, other=0).to(tl.float32)
        high = tl.maximum(high, x, propagate_nan=tl.PropagateNan.ALL)
        low = tl.minimum(low, x, propagate_nan=tl.PropagateNan.ALL)
    high = tl.reduce(tl.reduce(high, 1, _larger), 0, _larger)
    low = tl.reduce(tl.reduce(low, 1, _smaller), 0, _smaller)
    if not ASYMMETRIC:
        high = tl.maximum(high, -low, propagate_nan=tl.PropagateNan.ALL)
    at = matrix.to(tl.int64) * rows + row
    scale, zero = scales_of(low, high, WEIGHT, STORED, EPS, MINMAX, ASYMMETRIC)
    boost = tl.where(scale < TINY, BOOST, 1.0)
    inverse = tl.div_rn(1.0, scale * boost)
    stored = scale.to(STORED)
    tl.store(scales + at, stored)
    tl.store(bad + matrix, 1, mask=~(stored.to(tl.float32) < float("inf")))
    if ASYMMETRIC:
        tl.store(zeros + at, zero.to(tl.int8))
    for start in range(0, columns, TILE):
        x = tl.load(weight + start + place, mask=start + place < columns, other=0).to(tl.float32)
        bits = nibbles(x * boost, scale * boost, inverse, zero, WIDE, MINMAX, ASYMMETRIC)
        packed = tl.sum(bits << (4 * tl.arange(0, 8))[None, :], 1) - MAGIC_SUM
        word = start // 8 + tl.arange(0, TILE // 8)
        tl.store(words + at * (columns // 8) + word, packed, mask=word < columns // 8)


@triton.jit
def pack_zeros(zeros, packed, rows, groups, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Does `quant.formats.packing.pack_zero_point`: TILE words (first axis) of a matrix (second), 8 rows a word."""
    matrix = tl.program_id(1)
    word = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = word < tl.cdiv(rows, 8) * groups
    row = (word // groups * 8)[None, :] + tl.arange(0, 8)[:, None]
    place = matrix.to(tl.int64) * rows * groups + row * groups + (word % groups)[None, :]
    code = tl.load(zeros + place, mask=inside[None, :] & (row < rows), other=-8).to(tl.int32) + 8
    total = tl.sum(code << (4 * tl.arange(0, 8))[:, None], 0)
    tl.store(packed + matrix.to(tl.int64) * tl.cdiv(rows, 8) * groups + word, total, mask=inside)
