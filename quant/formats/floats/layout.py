"""Describes how one spelling of a low-precision format stores a weight: names, dtypes and shapes of its parts.

A weight is a number of few bits (a code) times the scale of its block and, in NVFP4, times a scale of the whole tensor.
Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ckptkit.core.specs import TensorSpec
from quant.formats.scheme import SCALE_DTYPES

Number = Literal["float8_e4m3fn", "float4_e2m1fn"]
Axes = Literal["grid", "row", "four", "groups"]
E4M3: Number = "float8_e4m3fn"
E2M1: Number = "float4_e2m1fn"
Block = tuple[int | None, int | None]
LARGEST: Mapping[str, float] = {E4M3: 448.0, E2M1: 6.0}
EXPONENTS = "float8_e8m0fnu"  # powers of two
FLOAT_SCALES = (*SCALE_DTYPES, EXPONENTS)
PACKED_GROUP = 16  # bytes of a group in gpt-oss's layout: 32 codes


@dataclass(frozen=True)
class Layout:
    """One spelling of a format.

    Endings are appended to the weight's name; one that begins with a dot replaces its `.weight`.
    """

    words: str  # the format in a few words
    number: Number
    block: Block  # rows and columns that share a scale; None: all of them
    scales: tuple[str, ...]  # endings of the scale's name, of which one is stored
    scale_dtypes: tuple[str, ...] = FLOAT_SCALES  # uint8: the exponents that float8_e8m0fnu stores
    codes: str = ""  # ending of the tensor of codes
    code_dtypes: tuple[str, ...] = (E4M3,)
    second: str = ""  # ending of the tensor's own scale; empty: it has none
    divides: bool = False  # whether that one divides
    inputs: tuple[str, ...] = ()  # endings of an activation's scale
    needs_input: bool = False  # whether an engine reads that scale
    axes: Axes = "grid"  # how scales are shaped, see `scale_shapes`
    only: str = ""  # ending of the modules that may be stored so

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Endings that only parts of a quantized weight have."""
        return tuple(
            f".weight{ending}" if ending == "_scale" else ending
            for ending in (*([self.codes] if self.codes else []), *self.scales, *([self.second] if self.second else []))
            if ending != ".scale"  # plain parameters may end in it too
        )

    def weight(self, codes: str) -> str:
        """Returns the name of the weight that the tensor `codes` stores."""
        return codes.removesuffix(self.codes) if self.codes else codes

    def beside(self, weight: str, ending: str) -> str:
        """Returns the name of a part of `weight`."""
        return weight.removesuffix(".weight") + ending if ending.startswith(".") else weight + ending

    def is_codes(self, spec: TensorSpec) -> bool:
        """Whether a tensor, by its name and dtype, holds codes of this layout."""
        name = spec.name
        return (
            spec.dtype in self.code_dtypes
            and name.endswith(self.codes)
            and self.weight(name).removesuffix(".weight").endswith(self.only)
        )

    def shape(self, codes: TensorSpec) -> tuple[int, ...] | None:
        """Returns the shape [..., rows, columns] of the weight; None where the codes are of no weight."""
        if self.axes == "groups":
            return (*codes.shape[:2], codes.shape[2] * 2 * PACKED_GROUP) if _is_grouped(codes) else None
        if len(codes.shape) < 2:
            return None
        return codes.shape if self.number == E4M3 else (*codes.shape[:-1], codes.shape[-1] * 2)

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns how many blocks a weight has: [..., rows of blocks, columns of blocks]."""
        height, width = self.block[0] or shape[-2], self.block[1] or shape[-1]
        return (*shape[:-2], -(-shape[-2] // (height or 1)), -(-shape[-1] // (width or 1)))

    def scale_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes that the scale of a weight may have, the usual one first; all list blocks in one order."""
        grid = self.grid(shape)
        if self.block == (None, None):
            return ((), (1,), grid) if self.axes == "row" else (grid, (), (1,))
        if self.axes == "row":
            return ((*shape[:-2], shape[-2]),)
        if self.axes == "four":
            return ((*grid[:-1], 1, grid[-1], 1),)
        return (grid,)

    @property
    def is_mxfp8(self) -> bool:
        """Whether scales are powers of two and codes E4M3, as OCP's Microscaling Formats have them."""
        return self.number == E4M3 and not set(self.scale_dtypes) & set(SCALE_DTYPES)

    @property
    def largest(self) -> float:
        """The largest code."""
        return LARGEST[self.number]

    @property
    def max_exponent(self) -> int:
        """The largest byte of a power of two that leaves every weight finite in bfloat16."""
        return 127 + 127 - math.frexp(self.largest)[1] + 1


def _is_grouped(codes: TensorSpec) -> bool:
    return len(codes.shape) == 4 and codes.shape[-1] == PACKED_GROUP
