"""Quantizes weights to INT4 or float8_e4m3fn on a GPU, hundreds of matrices a launch, in one read and one write.

The bytes are those of `ckptkit.quant.formats.grids` and `ckptkit.quant.kernels.floats` on the CPU. Divisions are
therefore correctly rounded: multiplying by the scale's reciprocal with Markstein's correction takes three operations a
weight instead of about ten. The kernels round to the weight's dtype wherever `minmax` does. Adding `_MAGIC` to a
float32 below 2**22 rounds it half to even and leaves the integer in the lowest bits.

Groups of bfloat16 weights with bfloat16 scales have a kernel of fewer instructions (`paired`), with two weights a
register if that is exact. A thread has four words of one group. Both grids find minima and maxima in pairs. `qmax7`
then uses float32 arithmetic. `minmax` rounds to bfloat16, so it stays in pairs:

- x / s is computed as x * (1 / s) in float32 and rounded to bfloat16, which gives the correctly rounded quotient.
  A quotient of two 8-bit significands is never a midpoint m of bfloat16: m has 9 bits, and m * s = x would need an odd
  number above 256 to divide x. x and m * s (17 bits) therefore differ by at least 2**-17, relatively; the product's
  error is only 2**-23.
- Adding 200 to a bfloat16 between -8 and 7 leaves code + 8 in the lowest four bits, rounded half to even.
- Weights i and i + 4 of a word share a register. The word is the sum of four registers shifted by 0, 4, 8 and 12 bits.

GPUs before compute capability 8.9 have no instruction for float8_e4m3fn and compute a code by integer arithmetic, as in
`ckptkit.quant.kernels.cpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.grids import check, not_finite
from ckptkit.quant.formats.packing import Packed
from ckptkit.quant.formats.scheme import CODES_PER_WORD, QuantScheme
from ckptkit.quant.kernels.float_roundings import ROUNDINGS, Fp8Weight, blocks_of, scale_dtype, tiny

_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23
_MAGIC = tl.constexpr(12582912.0 + 8.0)  # and the 8 added to every code
_MAGIC_BITS = 0x4B400000


def _as_int32(number: int) -> int:
    return ((number + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


MAGIC_SUM = tl.constexpr(_as_int32(sum(_MAGIC_BITS << 4 * place for place in range(8))))
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
    """Returns float32 scale and zero point of groups by least weight or 0 and largest or 0 (symmetric: absmax)."""
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
    """Does `pack_zero_point` of `ckptkit.quant.formats.packing`: TILE words (axis 0) of a matrix (axis 1)."""
    matrix = tl.program_id(1)
    word = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = word < tl.cdiv(rows, 8) * groups
    row = (word // groups * 8)[None, :] + tl.arange(0, 8)[:, None]
    place = matrix.to(tl.int64) * rows * groups + row * groups + (word % groups)[None, :]
    code = tl.load(zeros + place, mask=inside[None, :] & (row < rows), other=-8).to(tl.int32) + 8
    total = tl.sum(code << (4 * tl.arange(0, 8))[:, None], 0)
    tl.store(packed + matrix.to(tl.int64) * tl.cdiv(rows, 8) * groups + word, total, mask=inside)


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
_PAIRS_MAGIC_SUM = tl.constexpr(_as_int32(sum(0x43404340 << 4 * place for place in range(4))))


@triton.jit
def _larger_pair(left, right):  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [left, right], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _smaller_pair(left, right):  # type: ignore[no-untyped-def]
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
    return tl.reduce(tl.reduce(pairs, 3, _larger_pair, keep_dims=True), 2, _larger_pair, keep_dims=True)


@triton.jit
def _extremes(pairs, ASYMMETRIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns float32 [1, groups, 1, 1]: least weight or 0 and largest or 0; if symmetric, absmax twice."""
    if ASYMMETRIC:
        most = _largest(pairs)
        least = tl.reduce(tl.reduce(pairs, 3, _smaller_pair, keep_dims=True), 2, _smaller_pair, keep_dims=True)
        most = tl.maximum(_lower_half(most), _upper_half(most), propagate_nan=tl.PropagateNan.ALL)
        least = tl.minimum(_lower_half(least), _upper_half(least), propagate_nan=tl.PropagateNan.ALL)
        most = tl.maximum(most, 0.0, propagate_nan=tl.PropagateNan.ALL)
        least = -tl.minimum(least, 0.0, propagate_nan=tl.PropagateNan.ALL)
        # Both at once: exchange between threads costs more than their arithmetic.
        both = most.to(tl.int32, bitcast=True) | (least.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
        both = tl.reduce(both, 0, _larger_pair, keep_dims=True)
        return -_lower_half(both), _upper_half(both)
    both = tl.reduce(_largest(pairs & 0x7FFF7FFF), 0, _larger_pair, keep_dims=True)
    high = tl.maximum(_lower_half(both), _upper_half(both), propagate_nan=tl.PropagateNan.ALL)
    return high, high


@triton.jit
def _words_of_qmax7(pairs, scale):  # type: ignore[no-untyped-def]
    """Returns words [lanes, groups, turns, 1] for pairs [lanes, groups, turns, 4], with the codes of `grouped`."""
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


_TILE, _WARPS = 1024, 1  # weights a program takes; a single warp never waits for others
_PAIRED_TILE, _PAIRED_WARPS = 2048, 2
_ALIGNMENT = 16  # bytes of one load
_FIRST, _MAX_LAUNCH = 64, 1024  # matrices of the first and of the largest launch: their number doubles
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

Made = TypeVar("Made")


@dataclass(frozen=True)
class Launcher:
    """Starts `kernel` for non-empty matrices of one size and dtype, with `options` by name."""

    kernel: Any
    blocks: int
    options: Mapping[str, Any]

    def start(self, weights: Sequence[Tensor], outputs: Sequence[Tensor], bad: Tensor) -> None:
        """Quantizes contiguous matrices on the current stream; the current device must be theirs.

        Writes each of `outputs` (for INT4 words, scales and, if asymmetric, zero points; for FP8 codes and scales)
        matrix after matrix. Sets `bad`, int32, to 1 for each matrix with a weight or a scale that is not finite.
        """
        places = _places(weights)
        if int(np.bitwise_or.reduce(places)) % _ALIGNMENT:
            # A clone may be freed once the kernel is started: a reuse of its memory runs after the kernel.
            weights = [weight.clone() if weight.data_ptr() % _ALIGNMENT else weight for weight in weights]
            places = _places(weights)
        # Does not wait for earlier launches: unpinned memory is copied aside before the call returns.
        table = torch.from_numpy(places).to(bad.device, non_blocking=True)
        self.kernel[self.blocks, len(weights)](table, *outputs, bad=bad, **self.options)


def _places(weights: Sequence[Tensor]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.fromiter(map(Tensor.data_ptr, weights), np.int64, len(weights))


def launcher(scheme: QuantScheme, rows: int, columns: int, dtype: torch.dtype) -> Launcher:
    """Returns the launcher for matrices [rows, columns]. With groups only rows x columns matters."""
    stored = scheme.scale_dtype or dtype
    in_pairs = scheme.group_size and dtype == stored == torch.bfloat16
    formats = {"WEIGHT": TYPES[dtype], "STORED": TYPES[stored], "WIDE": TYPES[torch.promote_types(dtype, stored)]}
    tile, warps = (_PAIRED_TILE, _PAIRED_WARPS) if in_pairs else (_TILE, _WARPS)
    grid = {"MINMAX": scheme.grid == "minmax", "ASYMMETRIC": not scheme.symmetric, "EPS": torch.finfo(stored).eps}
    options = grid | {"TILE": tile, "num_warps": warps} | ({} if in_pairs else formats)
    options |= {"zeros": None} if scheme.symmetric else {}
    if scheme.group_size is None:
        return Launcher(channelwise, rows, options | {"rows": rows, "columns": columns})
    groups = rows * scheme.groups(columns)
    return Launcher(
        paired if in_pairs else grouped,
        triton.cdiv(groups, tile // scheme.group_size),
        options | {"groups": groups, "GROUP": scheme.group_size},
    )


working_on = torch.cuda.device  # makes a device the current one in a `with` block


def done(device: torch.device) -> Callable[[], None]:
    """Returns a function that waits for all work started so far on the device's current stream."""
    event = torch.cuda.current_stream(device).record_event()
    return lambda: event.synchronize()


def quantize_pack_cuda(weights: Sequence[Tensor], scheme: QuantScheme, names: Sequence[str]) -> list[Packed]:
    """Implements `dispatch.quantize_pack` for CUDA; results of one launch share their memory."""

    def launch(members: Sequence[int], bad: Tensor) -> Iterator[Packed]:
        check(weights[members[0]], scheme, names[members[0]])
        return _launch([weights[index] for index in members], scheme, bad)

    def error(index: int, packed: Packed) -> CkptkitError:
        return not_finite(weights[index], packed.scale.dtype, names[index])

    return run_launches(weights, launch, error)


def run_launches(
    weights: Sequence[Tensor],
    launch: Callable[[Sequence[int], Tensor], Iterable[Made]],
    error: Callable[[int, Made], CkptkitError],
) -> list[Made]:
    """Quantizes matrices of one GPU in launches of one shape and dtype each, and waits once, at the end.

    `launch` starts a launch for the weights at some indices and returns their results; it sets its second argument,
    int32, to 1 for each that is not finite. Raises the `error` of the first of those.
    """
    made: dict[int, Made] = {}
    bad = torch.zeros(len(weights), dtype=torch.int32, device=weights[0].device)
    for members in _launches(weights):
        made |= zip(members, launch(members, bad[len(made) :]), strict=True)
    first = min((index for index, flag in zip(made, bad.tolist(), strict=True) if flag), default=None)
    if first is not None:
        raise error(first, made[first])
    return [made[index] for index in range(len(weights))]


def _launches(weights: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yields the indices of the weights of each launch, first of few weights, so that the GPU starts early."""
    waiting: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    most = _FIRST
    for index, weight in enumerate(weights):
        kind = (weight.shape, weight.dtype)
        members = waiting.setdefault(kind, [])
        members.append(index)
        if len(members) == most:
            most = min(2 * most, _MAX_LAUNCH)
            yield waiting.pop(kind)
    yield from waiting.values()


def _launch(weights: Sequence[Tensor], scheme: QuantScheme, bad: Tensor) -> Iterator[Packed]:
    """Quantizes matrices of one shape and dtype; sets `bad`, int32, to 1 for each with a scale that is not finite."""
    count, (rows, columns), dtype, device = len(weights), weights[0].shape, weights[0].dtype, weights[0].device
    stored = scheme.scale_dtype or dtype
    groups = scheme.groups(columns)
    words = torch.empty((count, rows, columns // CODES_PER_WORD), dtype=torch.int32, device=device)
    scale = torch.empty((count, rows, groups), dtype=stored, device=device)
    zero = torch.empty((count, rows, groups), dtype=torch.int8, device=device) if not scheme.symmetric else None
    zeros = (
        torch.empty((count, triton.cdiv(rows, CODES_PER_WORD), groups), dtype=torch.int32, device=device)
        if not scheme.symmetric
        else None
    )
    with working_on(device):
        if words.numel():
            outputs = [words, scale] if zero is None else [words, scale, zero]
            launcher(scheme, rows, columns, dtype).start([weight.contiguous() for weight in weights], outputs, bad)
        else:
            scale.fill_(torch.finfo(stored).eps)
            if zero is not None:
                zero.zero_()
        if zeros is not None and zeros.numel():
            pack_zeros[triton.cdiv(zeros[0].numel(), _TILE), count](zero, zeros, rows, groups, TILE=_TILE)
    each: Iterable[Tensor | None] = [None] * count if zeros is None else zeros.unbind()
    return (Packed(*parts) for parts in zip(words.unbind(), scale.unbind(), each, strict=True))


_FLOAT_TILE = 8192  # weights a program takes, unless a block or a row is larger
_WEIGHTS_PER_WARP = 2048
_MAX_WIDTH = 65536  # of a row with one scale, which a program holds in registers


@triton.jit
def _scales(largest, ROUNDING: tl.constexpr, WEIGHT: tl.constexpr, TINY: tl.constexpr, EPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns scales as stored, and the float32 that weights are multiplied by, or divided by. `largest`: float32."""
    if ROUNDING == "slime":
        scale = tl.div_rn(tl.maximum(largest, TINY), 448.0)
        factor = scale
    elif ROUNDING == "slime-cuda":
        scale = tl.maximum(largest, TINY) * (1 / 448)
        factor = scale
    elif ROUNDING == "online":
        scale = tl.maximum(largest, 1e-10) * (1 / 448)
        factor = tl.div_rn(1.0, scale)
    elif ROUNDING == "transformers":
        factor = tl.div_rn(1.0, largest) * 448.0
        factor = tl.where(factor == float("inf"), 1.0, factor)
        scale = tl.div_rn(1.0, factor)
    elif ROUNDING == "deepgemm":
        above = tl.div_rn(tl.maximum(largest, 1e-4), 448.0).to(tl.int32, bitcast=True) + 0x007FFFFF
        scale = (above & 0x7F800000).to(tl.float32, bitcast=True)
        factor = tl.div_rn(1.0, scale)
    elif ROUNDING == "compressed-tensors":
        scale = tl.div_rn(largest, 448.0).to(WEIGHT).to(tl.float32)
        scale = tl.where(scale == 0, EPS, scale)
        factor = scale
    else:
        tl.static_assert(ROUNDING == "modelopt")
        bits = (largest * (1 / 448)).to(tl.int32, bitcast=True)
        scale = (tl.where(bits <= 0x00400000, 0, bits) + 0x007FFFFF) >> 23
        factor = ((254 - scale) << 23).to(tl.float32, bitcast=True)
    return scale, factor


@triton.jit
def _code(x):  # type: ignore[no-untyped-def]
    """The bits of float32 rounded half to even to float8_e4m3fn, at most 448."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 codes are multiples of 2^-9, which adding 2^14 leaves in the lowest bits.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    return (tl.where(magnitude >= 0x3C800000, normal, small) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def scaled(  # type: ignore[no-untyped-def]
    table, codes, scales, bad, rows, columns,
    WEIGHT: tl.constexpr, ROUNDING: tl.constexpr, DIVIDES: tl.constexpr, IN_WEIGHT_DTYPE: tl.constexpr,
    TINY: tl.constexpr, EPS: tl.constexpr, NATIVE: tl.constexpr, PER_ROW: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Quantizes ROWS x WIDTH weights (first grid axis) of one matrix (second axis). They share a scale, or each row."""
    matrix = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(columns, WIDTH)
    down, right = tl.program_id(0) // across, tl.program_id(0) % across
    row = down * ROWS + tl.arange(0, ROWS)[:, None]
    column = right * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (column < columns)
    place = row.to(tl.int64) * columns + column
    weight = tl.multiple_of(tl.load(table + matrix).to(tl.pointer_type(WEIGHT)), 16)
    x = tl.load(weight + place, mask=inside, other=0).to(tl.float32)
    # As integers magnitudes have the order of their floats, and non-finite numbers are beyond infinity's bits.
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if PER_ROW:
        largest = tl.max(magnitude, 1, keep_dims=True)
        line, lines = row, rows
    else:
        largest = tl.max(magnitude)
        line, lines = down, tl.cdiv(rows, ROWS)
    scale, factor = _scales(largest.to(tl.float32, bitcast=True), ROUNDING, WEIGHT, TINY, EPS)
    tl.store(scales + (matrix * lines + line) * across + right, scale, mask=line < lines)
    tl.store(bad + matrix + line * 0, 1, mask=largest >= 0x7F800000)
    x = tl.div_rn(x, factor) if DIVIDES else x * factor
    if IN_WEIGHT_DTYPE:
        x = x.to(WEIGHT).to(tl.float32)
    code = tl.clamp(x, -448.0, 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True) if NATIVE else _code(x)
    tl.store(codes.to(tl.pointer_type(tl.uint8), bitcast=True) + matrix * rows * columns + place, code, mask=inside)


def has_kernel(weight: Tensor, block: tuple[int, int | None]) -> bool:
    """Whether `fp8_launcher` supports this matrix: on a GPU, not empty, with a known block."""
    fits = block in ((128, 128), (1, 32)) or (block == (1, None) and weight.shape[1] <= _MAX_WIDTH)
    return weight.is_cuda and weight.numel() > 0 and fits


def fp8_launcher(weight: Tensor, block: tuple[int, int | None], rounding: str) -> Launcher:
    """Returns the launcher for matrices like `weight` with `has_kernel`; its outputs are codes and scales."""
    (rows, columns), dtype, formula = weight.shape, weight.dtype, ROUNDINGS[rounding]
    height, width = block[0], block[1] or triton.next_power_of_2(columns)
    if height == 1 and columns % width == 0:
        rows, columns = weight.numel() // width, width  # groups are consecutive, regardless of rows
    height = max(height, _FLOAT_TILE // width) if height == 1 else height
    return Launcher(
        scaled,
        triton.cdiv(rows, height) * triton.cdiv(columns, width),
        {
            "rows": rows,
            "columns": columns,
            "WEIGHT": TYPES[dtype],
            "ROUNDING": rounding,
            "DIVIDES": formula.divides,
            "IN_WEIGHT_DTYPE": formula.in_weight_dtype,
            "TINY": tiny(dtype),
            "EPS": torch.finfo(dtype).eps,
            "NATIVE": _converts(weight.device),
            "PER_ROW": block[0] == 1,
            "ROWS": height,
            "WIDTH": width,
            "num_warps": min(max(height * width // _WEIGHTS_PER_WARP, 1), 32),
        },
    )


def _converts(device: torch.device) -> bool:
    """Whether a GPU has an instruction that converts to float8_e4m3fn."""
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (8, 9)


def quantize_fp8_cuda(
    weights: Sequence[Tensor], block: tuple[int, int | None], rounding: str, names: Sequence[str]
) -> list[Fp8Weight]:
    """Implements `ckptkit.quant.kernels.floats.quantize_fp8` for matrices of one GPU, with one wait."""

    def launch(members: Sequence[int], bad: Tensor) -> list[Fp8Weight]:
        some = [weights[index].detach().contiguous() for index in members]
        shape, device = some[0].shape, some[0].device
        codes = torch.empty((len(some), *shape), dtype=torch.float8_e4m3fn, device=device)
        stored = scale_dtype(rounding, some[0].dtype)
        scales = torch.empty((len(some), *blocks_of(shape, block)), dtype=stored, device=device)
        with working_on(device):
            fp8_launcher(some[0], block, rounding).start(some, [codes, scales], bad)
        return list(map(Fp8Weight, codes.unbind(), scales.unbind()))

    def error(index: int, made: Fp8Weight) -> CkptkitError:
        return not_finite(weights[index], made.scales.dtype, names[index])

    return run_launches(weights, launch, error)
