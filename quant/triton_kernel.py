"""Weights to INT4 words and scales on a GPU: read once, written once, hundreds of matrices a launch.

The bytes are those of `quant.grids` on the CPU. What that takes: divisions are correctly rounded (from the reciprocal of the
scale by Markstein's correction, three operations a weight instead of about ten), and where `minmax` rounds to the weight's dtype,
so does this. Adding `_MAGIC` to a float32 below 2**22 rounds it half to even and leaves the integer in the lowest bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.grids import check, not_finite
from quant.packed import Packed
from quant.packing import pack_zero_point
from quant.scheme import CODES_PER_WORD, QuantScheme

_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23
_MAGIC = tl.constexpr(12582912.0 + 8.0)  # and the 8 that is added to every code
_MAGIC_BITS = 0x4B400000
_MAGIC_SUM = tl.constexpr(((sum(_MAGIC_BITS << 4 * place for place in range(8)) + (1 << 31)) & 0xFFFFFFFF) - (1 << 31))  # wrapped to int32
_SEVENTH = tl.constexpr(0.14285714924335479736328125)  # float32(1 / 7)
_TINY = tl.constexpr(2.0**-64)  # reciprocals of smaller scales, and residuals, could leave float32's range
_BOOST = tl.constexpr(2.0**80)
_TILE = 1024  # weights a program takes: one warp has no one to wait for
_WARPS = 1
_ALIGNMENT = 16  # bytes that one load takes
_MOST = 256  # matrices of one launch: while the GPU works on them, the next are prepared
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _larger(left, right):  # type: ignore[no-untyped-def]
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _smaller(left, right):  # type: ignore[no-untyped-def]
    return tl.minimum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _scales(  # type: ignore[no-untyped-def]
    low, high, WEIGHT: tl.constexpr, STORED: tl.constexpr, EPS: tl.constexpr, MINMAX: tl.constexpr, ASYMMETRIC: tl.constexpr
):  # fmt: skip
    """The scale to divide by and the zero point of each group, float32. `high` and `low`: its largest and least weight, or 0; absmax when symmetric."""
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
    """Float32 rounded to what DTYPE can hold, as float32."""
    if DTYPE == tl.bfloat16:
        # Two at a time: the conversion of one runs at an eighth of the speed.
        pair: tl.constexpr = "{.reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000;}"
        return tl.inline_asm_elementwise(pair, "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _nibbles(x, scale, inverse, zero, WIDE: tl.constexpr, MINMAX: tl.constexpr, ASYMMETRIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """`_MAGIC_BITS` + 8 + code, int32, for every weight; scale, inverse and zero broadcast."""
    quotient = x * inverse
    quotient = tl.fma(tl.fma(-quotient, scale, x), inverse, quotient)
    if MINMAX:
        quotient = _rounded(quotient, WIDE)
        if ASYMMETRIC:
            quotient = _rounded(quotient + zero, WIDE)
        quotient = tl.clamp(quotient, -8.0, 7.0)
    return (quotient + _MAGIC).to(tl.int32, bitcast=True)


@triton.jit
def _grouped(  # type: ignore[no-untyped-def]
    table, words, scales, zeros, bad, groups,
    WEIGHT: tl.constexpr, STORED: tl.constexpr, WIDE: tl.constexpr, EPS: tl.constexpr, MINMAX: tl.constexpr,
    ASYMMETRIC: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One matrix of `groups` groups along the second grid axis, TILE // GROUP groups of it along the first."""
    BLOCK: tl.constexpr = TILE // GROUP
    WORDS: tl.constexpr = GROUP // 8
    matrix = tl.program_id(1)
    weight = tl.multiple_of(tl.load(table + matrix).to(tl.pointer_type(WEIGHT)), 16)
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = group < groups
    word = group[:, None].to(tl.int64) * WORDS + tl.arange(0, WORDS)[None, :]
    x = tl.load(weight + word[:, :, None] * 8 + tl.arange(0, 8)[None, None, :], mask=inside[:, None, None], other=0).to(tl.float32)
    if ASYMMETRIC:
        high = tl.maximum(tl.reduce(tl.reduce(x, 2, _larger), 1, _larger), 0.0, propagate_nan=tl.PropagateNan.ALL)
        low = tl.minimum(tl.reduce(tl.reduce(x, 2, _smaller), 1, _smaller), 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        high = tl.reduce(tl.reduce(tl.abs(x), 2, _larger), 1, _larger)
        low = high
    scale, zero = _scales(low, high, WEIGHT, STORED, EPS, MINMAX, ASYMMETRIC)
    divisor = scale
    if MINMAX:
        if tl.min(scale, 0) < _TINY:
            boost = tl.where(scale < _TINY, _BOOST, 1.0)
            divisor = scale * boost
            x = x * boost[:, None, None]
    inverse = tl.div_rn(1.0, divisor)
    first = matrix.to(tl.int64) * groups
    bits = _nibbles(x, divisor[:, None, None], inverse[:, None, None], zero[:, None, None], WIDE, MINMAX, ASYMMETRIC)
    packed = tl.sum(bits << (4 * tl.arange(0, 8))[None, None, :], 2) - _MAGIC_SUM
    tl.store(words + first * WORDS + word, packed, mask=inside[:, None])
    stored = scale.to(STORED)
    tl.store(scales + first + group, stored, mask=inside)
    tl.store(bad + matrix + group * 0, 1, mask=inside & ~(stored.to(tl.float32) < float("inf")))
    if ASYMMETRIC:
        tl.store(zeros + first + group, zero.to(tl.int8), mask=inside)


@triton.jit
def _channelwise(  # type: ignore[no-untyped-def]
    table, words, scales, zeros, bad, rows, columns,
    WEIGHT: tl.constexpr, STORED: tl.constexpr, WIDE: tl.constexpr, EPS: tl.constexpr, MINMAX: tl.constexpr,
    ASYMMETRIC: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row (first grid axis) of one matrix (second), read twice: the second time it comes from the cache."""
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
    scale, zero = _scales(low, high, WEIGHT, STORED, EPS, MINMAX, ASYMMETRIC)
    boost = tl.where(scale < _TINY, _BOOST, 1.0)
    inverse = tl.div_rn(1.0, scale * boost)
    stored = scale.to(STORED)
    tl.store(scales + at, stored)
    tl.store(bad + matrix, 1, mask=~(stored.to(tl.float32) < float("inf")))
    if ASYMMETRIC:
        tl.store(zeros + at, zero.to(tl.int8))
    for start in range(0, columns, TILE):
        x = tl.load(weight + start + place, mask=start + place < columns, other=0).to(tl.float32)
        bits = _nibbles(x * boost, scale * boost, inverse, zero, WIDE, MINMAX, ASYMMETRIC)
        packed = tl.sum(bits << (4 * tl.arange(0, 8))[None, :], 1) - _MAGIC_SUM
        word = start // 8 + tl.arange(0, TILE // 8)
        tl.store(words + at * (columns // 8) + word, packed, mask=word < columns // 8)


def quantize_pack_cuda(weights: Sequence[Tensor], scheme: QuantScheme, names: Sequence[str]) -> list[Packed]:
    """`quant.kernels.quantize_pack` for CUDA tensors; parts of one launch share their memory.

    Every launch takes up to `_MOST` matrices of a shape and dtype; at the end one wait for the GPU tells whether everything was finite.
    Raises CkptkitError as that does.
    """
    kinds = _alike(weights)
    for members in kinds:
        check(weights[members[0]], scheme, names[members[0]])
    launches = [members[start : start + _MOST] for members in kinds for start in range(0, len(members), _MOST)]
    bad = torch.zeros((len(launches), _MOST), dtype=torch.int32, device=weights[0].device)
    packed: dict[int, Packed] = {}
    for members, flags in zip(launches, bad.unbind(), strict=True):
        packed |= zip(members, _launch([weights[index] for index in members], scheme, flags), strict=True)
    wrong = [members[place] for members, flags in zip(launches, bad.tolist(), strict=True) for place in range(len(members)) if flags[place]]
    if wrong:
        first = min(wrong)
        raise not_finite(weights[first], packed[first].scale.dtype, names[first])
    return [packed[index] for index in range(len(weights))]


def _alike(weights: Sequence[Tensor]) -> list[list[int]]:
    """The places of the weights of one shape and dtype, for each. There may be thousands, and the GPU waits: what is asked of every one counts."""
    places: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    kind, members = None, []
    for index, weight in enumerate(weights):
        if (found := (weight.shape, weight.dtype)) != kind:
            kind, members = found, places.setdefault(found, [])
        members.append(index)
    return list(places.values())


def _launch(weights: Sequence[Tensor], scheme: QuantScheme, bad: Tensor) -> Iterator[Packed]:
    """Matrices of one shape and dtype; `bad` gets a 1 for each that has a scale which is not finite."""
    count, (rows, columns), dtype, device = len(weights), weights[0].shape, weights[0].dtype, weights[0].device
    stored = scheme.scale_dtype or dtype
    groups = scheme.groups(columns)
    straight = [weight if weight.is_contiguous() else weight.contiguous() for weight in weights]
    places = [weight.data_ptr() for weight in straight]
    if any(place % _ALIGNMENT for place in places):
        straight = [weight.clone() if weight.data_ptr() % _ALIGNMENT else weight for weight in straight]
        places = [weight.data_ptr() for weight in straight]
    # Not waiting for the launches before: memory that is not pinned is copied aside before the call returns.
    table = torch.tensor(places, dtype=torch.int64).to(device, non_blocking=True)
    words = torch.empty((count, rows, columns // CODES_PER_WORD), dtype=torch.int32, device=device)
    scale = torch.empty((count, rows, groups), dtype=stored, device=device)
    zero = torch.empty((count, rows, groups) if not scheme.symmetric else (0,), dtype=torch.int8, device=device)
    formats = {
        "WEIGHT": _TYPES[dtype],
        "STORED": _TYPES[stored],
        "WIDE": _TYPES[torch.promote_types(dtype, stored)],
        "EPS": torch.finfo(stored).eps,
        "MINMAX": scheme.grid == "minmax",
        "ASYMMETRIC": not scheme.symmetric,
        "TILE": _TILE,
        "num_warps": _WARPS,
    }
    with torch.cuda.device(device):
        if not words.numel():
            scale.fill_(torch.finfo(stored).eps)
        elif scheme.group_size:
            grid = (triton.cdiv(rows * groups, _TILE // scheme.group_size), count)
            _grouped[grid](table, words, scale, zero, bad, rows * groups, GROUP=scheme.group_size, **formats)
        else:
            _channelwise[rows, count](table, words, scale, zero, bad, rows, columns, **formats)
    zeros: Iterable[Tensor | None] = [None] * count if scheme.symmetric else pack_zero_point(zero).unbind()
    return (Packed(*parts) for parts in zip(words.unbind(), scale.unbind(), zeros, strict=True))
