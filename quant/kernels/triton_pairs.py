"""Quantizes groups of bfloat16 weights with bfloat16 scales on a GPU, two weights a register where that is exact.

The bytes are those of `quant.kernels.triton_kernel`, in fewer instructions. A thread has four words of one group. Both
grids find minima and maxima in pairs. `qmax7` then uses that module's float32 arithmetic. `minmax` rounds to bfloat16,
so it stays in pairs:

- x / s is computed as x * (1 / s) in float32 and rounded to bfloat16, which gives the correctly rounded quotient.
  A quotient of two 8-bit significands is never a midpoint m of bfloat16: m has 9 bits, and m * s = x would need an odd
  number above 256 to divide x. x and m * s (17 bits) therefore differ by at least 2**-17, relatively; the product's
  error is only 2**-23.
- Adding 200 to a bfloat16 between -8 and 7 leaves code + 8 in the lowest four bits, rounded half to even.
- Weights i and i + 4 of a word share a register. The word is the sum of four registers shifted by 0, 4, 8 and 12 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quant.kernels.triton_kernel import BOOST, MAGIC_SUM, TINY, nibbles, scales_of


def _word_of_eight(asymmetric: bool) -> str:
    """Returns PTX that packs eight weights into a word.

    In: four registers of weights, then four copies each of a factor, of 1 / scale / factor and, if asymmetric, of the
    zero point in both halves. Out: the word, and three zeros.
    """
    shift = "fma.rn.bf16x2 p{0}, p{0}, one, $16;" if asymmetric else ""
    return "\n".join(
        [
            "{ .reg .b32 w<8>, p<4>, one, least, most, magic;",
            # 1, -8, 7, 200
            "mov.b32 one, 0x3f803f80; mov.b32 least, 0xc100c100; mov.b32 most, 0x40e040e0; mov.b32 magic, 0x43484348;",
            *(
                f"shl.b32 w{2 * pair}, ${4 + pair}, 16; and.b32 w{2 * pair + 1}, ${4 + pair}, 0xffff0000;"
                for pair in range(4)
            ),
            *(f"mul.rn.f32 w{place}, w{place}, $8; mul.rn.f32 w{place}, w{place}, $12;" for place in range(8)),
            *(f"cvt.rn.bf16x2.f32 p{place}, w{place + 4}, w{place}; {shift.format(place)}" for place in range(4)),
            *(f"max.bf16x2 p{place}, p{place}, least; min.bf16x2 p{place}, p{place}, most;" for place in range(4)),
            *(f"fma.rn.bf16x2 p{place}, p{place}, one, magic;" for place in range(4)),
            "mad.lo.u32 p0, p1, 16, p0; mad.lo.u32 p2, p3, 16, p2; mad.lo.u32 $0, p2, 256, p0;",
            "mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }",
        ]
    )


_SYMMETRIC_WORD, _ASYMMETRIC_WORD = tl.constexpr(_word_of_eight(False)), tl.constexpr(_word_of_eight(True))
_THREE_INPUTS, _FOUR_INPUTS = (tl.constexpr(",".join(["=r"] * 4 + ["r"] * 4 * inputs)) for inputs in (3, 4))
_PAIRS_MAGIC_SUM = tl.constexpr(
    ((sum(0x43404340 << 4 * place for place in range(4)) + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)
)  # wrapped to int32


@triton.jit
def _larger(left, right):  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [left, right], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _smaller(left, right):  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise(
        "min.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [left, right], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _lower_half(pair):  # type: ignore[no-untyped-def]
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def _upper_half(pair):  # type: ignore[no-untyped-def]
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _largest(pairs):  # type: ignore[no-untyped-def]
    """Returns the largest of each group, for both halves; keeps the axes."""
    return tl.reduce(tl.reduce(pairs, 3, _larger, keep_dims=True), 2, _larger, keep_dims=True)


@triton.jit
def _extremes(pairs, ASYMMETRIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns each group's least weight or 0 and its largest or 0; if symmetric, absmax twice.

    `pairs`: [lanes, groups, turns, 4]. Results: float32 [1, groups, 1, 1].
    """
    if ASYMMETRIC:
        most = _largest(pairs)
        least = tl.reduce(tl.reduce(pairs, 3, _smaller, keep_dims=True), 2, _smaller, keep_dims=True)
        most = tl.maximum(_lower_half(most), _upper_half(most), propagate_nan=tl.PropagateNan.ALL)
        least = tl.minimum(_lower_half(least), _upper_half(least), propagate_nan=tl.PropagateNan.ALL)
        most = tl.maximum(most, 0.0, propagate_nan=tl.PropagateNan.ALL)
        least = -tl.minimum(least, 0.0, propagate_nan=tl.PropagateNan.ALL)
        # Both at once: exchange between threads costs more than their arithmetic.
        both = most.to(tl.int32, bitcast=True) | (least.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
        both = tl.reduce(both, 0, _larger, keep_dims=True)
        return -_lower_half(both), _upper_half(both)
    both = tl.reduce(_largest(pairs & 0x7FFF7FFF), 0, _larger, keep_dims=True)
    high = tl.maximum(_lower_half(both), _upper_half(both), propagate_nan=tl.PropagateNan.ALL)
    return high, high


@triton.jit
def _words_of_qmax7(pairs, scale):  # type: ignore[no-untyped-def]
    """Returns words [lanes, groups, turns, 1] for pairs [lanes, groups, turns, 4].

    The codes are those of `quant.kernels.triton_kernel.grouped`.
    """
    inverse = tl.div_rn(1.0, scale)
    low = nibbles(_lower_half(pairs), scale, inverse, 0.0, tl.bfloat16, False, False)
    high = nibbles(_upper_half(pairs), scale, inverse, 0.0, tl.bfloat16, False, False)
    return tl.sum((low + (high << 4)) << (8 * tl.arange(0, 4))[None, None, None, :], 3, keep_dims=True) - MAGIC_SUM


@triton.jit
def _words_of_minmax(pairs, scale, zero, ASYMMETRIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns words for pairs, shaped as in `_words_of_qmax7`."""
    boost = tl.where(scale < TINY, BOOST, 1.0)
    inverse = tl.div_rn(1.0, scale * boost)
    if ASYMMETRIC:
        both = zero.to(tl.int32, bitcast=True)
        both = both | (both >> 16) & 0xFFFF
        quads = tl.inline_asm_elementwise(
            _ASYMMETRIC_WORD, _FOUR_INPUTS, [pairs, boost, inverse, both], dtype=tl.int32, is_pure=True, pack=4
        )
    else:
        quads = tl.inline_asm_elementwise(
            _SYMMETRIC_WORD, _THREE_INPUTS, [pairs, boost, inverse], dtype=tl.int32, is_pure=True, pack=4
        )
    return tl.sum(quads, 3, keep_dims=True) - _PAIRS_MAGIC_SUM


@triton.jit
def paired(  # type: ignore[no-untyped-def]
    table, words, scales, zeros, bad, groups,
    EPS: tl.constexpr, MINMAX: tl.constexpr, ASYMMETRIC: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Quantizes TILE // GROUP groups (first grid axis) of one matrix of `groups` groups (second axis)."""
    BLOCK: tl.constexpr = TILE // GROUP
    WORDS: tl.constexpr = GROUP // 8
    TURNS: tl.constexpr = 4
    LANES: tl.constexpr = WORDS // TURNS
    matrix = tl.program_id(1)
    weight = tl.multiple_of(tl.load(table + matrix).to(tl.pointer_type(tl.int32)), 16)
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :, None, None]
    inside = group < groups
    # Triton spreads the first two axes over the threads: each has one lane of a group, with one word a turn.
    lane = tl.arange(0, LANES)[:, None, None, None]
    turn = tl.arange(0, TURNS)[None, None, :, None]
    word = group.to(tl.int64) * WORDS + turn * LANES + lane
    pairs = tl.load(weight + word * 4 + tl.arange(0, 4)[None, None, None, :], mask=inside, other=0)
    low, high = _extremes(pairs, ASYMMETRIC)
    scale, zero = scales_of(low, high, tl.bfloat16, tl.bfloat16, EPS, MINMAX, ASYMMETRIC)
    first = matrix.to(tl.int64) * groups
    packed = _words_of_minmax(pairs, scale, zero, ASYMMETRIC) if MINMAX else _words_of_qmax7(pairs, scale)
    tl.store(words + first * WORDS + word, packed, mask=inside)
    stored = scale.to(tl.bfloat16)
    tl.store(scales + first + group, stored, mask=inside)
    tl.store(bad + matrix + group * 0, 1, mask=inside & ~(stored.to(tl.float32) < float("inf")))
    if ASYMMETRIC:
        tl.store(zeros + first + group, zero.to(tl.int8), mask=inside)
