"""The CPU kernel in LLVM's instructions: 32 weights at a time, from the load to the 16 bytes of codes, with nothing in memory between.

Minima and maxima are taken over the weights' bits as integers, which order as the floats do once the sign is accounted for: integer
reductions need no rule for NaN, and anything that is not finite lies beyond the bits of infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from llvmlite import ir

from quant.formats.scheme import Grid
from quant.kernels.llvm import (
    FLOAT,
    I8,
    I16,
    I32,
    I64,
    constant,
    from_bits,
    loop,
    pick,
    reduced,
    rounded,
    splat,
    to_bits,
)

_LANES, _TAIL = 32, 8  # 32 divides every group; a whole row is only known to fill words
_ROUNDS = 12582912.0  # 1.5 * 2**23: added to a small float32, it rounds it half to even and leaves the integer in the lowest bits
_SEVENTH = 0.14285714924335479736328125  # float32(1 / 7)
_SMALLEST_QMAX7_SCALE = 9.999999747378752e-06  # float32(1e-5)
_INFINITY = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}


@dataclass(frozen=True)
class Variant:
    """What the code is written for. `whole_rows`: a group need not be a multiple of 32 weights."""

    weight: torch.dtype
    scale: torch.dtype
    grid: Grid
    symmetric: bool
    whole_rows: bool

    @property
    def quotient(self) -> torch.dtype:
        """What a weight divided by its scale is rounded to."""
        return torch.float32 if self.grid == "qmax7" else torch.promote_types(self.weight, self.scale)


def kernel(variant: Variant) -> ir.Module:
    """Module with the function `quantize(weights, words, scales, zero points, first, last, size)`, all int64, the first four addresses.

    It quantizes groups `first` to `last` of `size` neighbouring weights each; zero points are int8. Returns 0, or 1 when a weight or a
    scale is not finite.
    """
    module = ir.Module("ckptkit")
    function = ir.Function(module, ir.FunctionType(I64, [I64] * 7), "quantize")
    code = ir.IRBuilder(function.append_basic_block())
    weights, words, scales, zeros, first, last, size = function.args
    writer = _Writer(code, variant, weights, words, scales, zeros, size)
    (bad,) = loop(code, first, last, 1, writer.group, [ir.IntType(1)(0)])
    code.ret(code.zext(bad, I64))
    return module


@dataclass(frozen=True)
class _Range:
    """The least and the largest weight of a group, zero included, float32; when symmetric `high` is the absolute maximum."""

    low: Any
    high: Any
    bad: Any


@dataclass(frozen=True)
class _Writer:
    """Writes the instructions for a group at a time."""

    code: ir.IRBuilder
    variant: Variant
    weights: Any
    words: Any
    scales: Any
    zeros: Any
    size: Any

    @property
    def _bits(self) -> Any:
        return I32 if self.variant.weight == torch.float32 else I16

    def group(self, index: Any, bad: Any) -> Sequence[Any]:
        """One group; `bad` becomes true when something is not finite."""
        code, variant = self.code, self.variant
        first = code.mul(index, self.size)
        weights = code.add(self.weights, code.mul(first, I64(self._bits.width // 8)))
        found = self._range(weights)
        scale, zero = (self._qmax7(found), None) if variant.grid == "qmax7" else self._minmax(found)
        stored = self._stored(scale)
        self._put(self.scales, index, to_bits(code, stored, variant.scale))
        if zero is not None:
            self._put(self.zeros, index, code.fptosi(zero, I8))
        self._codes(
            weights, code.add(self.words, code.lshr(first, I64(1))), scale if variant.grid == "qmax7" else stored, zero
        )
        overflow = code.fcmp_ordered(">=", stored, FLOAT(float("inf")))
        return [code.or_(bad, code.or_(found.bad, overflow))]

    def _put(self, array: Any, index: Any, value: Any) -> None:
        address = self.code.add(array, self.code.mul(index, I64(value.type.width // 8)))
        self.code.store(value, self.code.inttoptr(address, value.type.as_pointer()))

    def _load(self, weights: Any, index: Any, lanes: int) -> Any:
        width = self._bits.width // 8
        address = self.code.add(weights, self.code.mul(index, I64(width)))
        return self.code.load(self.code.inttoptr(address, ir.VectorType(self._bits, lanes).as_pointer()), align=width)

    def _spans(self) -> list[tuple[int, Any, Any]]:
        """Lanes, first and last weight of what is done with vectors of that size."""
        if not self.variant.whole_rows:
            return [(_LANES, I64(0), self.size)]
        full = self.code.and_(self.size, I64(-_LANES))
        return [(_LANES, I64(0), full), (_TAIL, full, self.size)]

    def _range(self, weights: Any) -> _Range:
        code, infinity = self.code, _INFINITY[self.variant.weight]
        orders = (">",) if self.variant.symmetric else ("<", ">")
        ends = [self._bits(0) for _ in orders]
        for lanes, start, stop in self._spans():

            def widen(index: Any, *extremes: Any, lanes: int = lanes) -> Sequence[Any]:
                key = self._key(self._load(weights, index, lanes))
                return [pick(code, order, key, extreme) for order, extreme in zip(orders, extremes, strict=True)]

            none = ir.VectorType(self._bits, lanes)([self._bits(0)] * lanes)
            found = loop(code, start, stop, lanes, widen, [none] * len(orders))
            ends = [
                pick(code, order, reduced(code, order, one), end)
                for order, one, end in zip(orders, found, ends, strict=True)
            ]
        high = from_bits(code, ends[-1], self.variant.weight)
        bad = code.icmp_signed(">=", ends[-1], self._bits(infinity))
        if self.variant.symmetric:
            return _Range(None, high, bad)
        low = from_bits(code, self._key(ends[0]), self.variant.weight)
        return _Range(low, high, code.or_(bad, code.icmp_signed("<=", ends[0], self._bits(-infinity - 1))))

    def _key(self, bits: Any) -> Any:
        """Signed integers that order as the floats with these bits, or as their absolute values; keys of keys are the bits again."""
        magnitude = constant(self._bits, (1 << (self._bits.width - 1)) - 1, bits)
        if self.variant.symmetric:
            return self.code.and_(bits, magnitude)
        sign = self.code.ashr(bits, constant(self._bits, self._bits.width - 1, bits))
        return self.code.xor(bits, self.code.and_(sign, magnitude))

    def _qmax7(self, found: _Range) -> Any:
        return pick(self.code, ">", self.code.fmul(found.high, FLOAT(_SEVENTH)), FLOAT(_SMALLEST_QMAX7_SCALE))

    def _minmax(self, found: _Range) -> tuple[Any, Any]:
        """Scale and zero point, every operation rounded to the weight's dtype."""
        code = self.code
        if self.variant.symmetric:
            return self._round(code.fdiv(found.high, FLOAT(7.5))), None
        scale = self._round(code.fdiv(self._round(code.fsub(found.high, found.low)), FLOAT(15)))
        zero = self._round(code.fsub(FLOAT(-8), self._round(code.fdiv(found.low, scale))))
        none = code.fcmp_unordered("uno", zero, zero)  # 0 / 0: no range, no zero point
        zero = pick(code, ">", pick(code, "<", zero, FLOAT(7)), FLOAT(-8))
        zero = code.fsub(code.fadd(zero, FLOAT(_ROUNDS)), FLOAT(_ROUNDS))
        return scale, code.select(none, FLOAT(0), zero)

    def _round(self, x: Any) -> Any:
        return rounded(self.code, x, self.variant.weight)

    def _stored(self, scale: Any) -> Any:
        stored = rounded(self.code, scale, self.variant.scale)
        zero = self.code.fcmp_ordered("==", stored, FLOAT(0))
        return self.code.select(zero, FLOAT(torch.finfo(self.variant.scale).eps), stored)

    def _codes(self, weights: Any, words: Any, scale: Any, zero: Any) -> None:
        code, quotient = self.code, self.variant.quotient
        for lanes, start, stop in self._spans():
            scales = splat(code, scale, lanes)
            zeros = None if zero is None else splat(code, zero, lanes)

            def encode(index: Any, lanes: int = lanes, scales: Any = scales, zeros: Any = zeros) -> Sequence[Any]:
                x = rounded(
                    code,
                    code.fdiv(from_bits(code, self._load(weights, index, lanes), self.variant.weight), scales),
                    quotient,
                )
                if zeros is not None:
                    x = rounded(code, code.fadd(x, zeros), quotient)
                address = code.add(words, code.lshr(index, I64(1)))
                self._store_codes(x, address)
                return []

            loop(code, start, stop, lanes, encode)

    def _store_codes(self, x: Any, address: Any) -> None:
        """Clamps, rounds, adds 8 and puts neighbours into the lower and the upper half of a byte."""
        code, pairs = self.code, x.type.count // 2
        x = pick(code, ">", pick(code, "<", x, constant(FLOAT, 7, x)), constant(FLOAT, -8, x))
        bits = code.bitcast(code.fadd(x, constant(FLOAT, _ROUNDS + 8, x)), ir.VectorType(I32, x.type.count))
        both = code.bitcast(code.trunc(bits, ir.VectorType(I8, x.type.count)), ir.VectorType(I16, pairs))
        packed = code.trunc(code.or_(both, code.lshr(both, constant(I16, 4, both))), ir.VectorType(I8, pairs))
        code.store(packed, code.inttoptr(address, packed.type.as_pointer()), align=1)
