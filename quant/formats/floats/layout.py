"""How each spelling of a low-precision format stores a weight: names, dtypes and shapes of its parts.

A weight is a number of few bits (a code) times the scale of its block and, in NVFP4, times a scale of the tensor.
Imports no torch. The known spellings:

| row | tensors | written by |
| --- | --- | --- |
| `fp8` | `N.weight`, `N.weight_scale_inv` (or `_scale`, `N.scale`; Mistral `N.qscale_weight`) | DeepSeek, Qwen, slime |
| `compressed_fp8` | `N.weight`, `N.weight_scale` | compressed-tensors, llm-compressor, GLM |
| `modelopt_fp8` | scales [], [rows], or [rows / 128, 1, columns / 128, 1] | NVIDIA ModelOpt |
| `quark_fp8` | the same with scales [] or [rows] | AMD Quark |
| `mxfp8` | `N.weight`, `N.weight_scale_inv` or `N.weight_scale` | miles, MiniMax-M3, ModelOpt, compressed-tensors |
| `MXFP4_EXPERTS` | `N_blocks`, `N_scales` | gpt-oss |
| `MXFP4_BYTES` | `N.weight` int8, `N.scale` or `N.weight_scale_inv` | DeepSeek-V4's experts |
| `mxfp4` | `N.weight` or `N.weight_packed`, `N.weight_scale` | Quark and ModelOpt; compressed-tensors |
| `modelopt_nvfp4` | `N.weight`, `N.weight_scale`, `N.weight_scale_2` (multiplies) | ModelOpt, miles |
| `quark_nvfp4` | the same, and `N.input_scale_2` for `N.input_scale` | AMD Quark |
| `compressed_nvfp4` | `N.weight_packed`, `N.weight_scale`, `N.weight_global_scale` (divides) | compressed-tensors |
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ckptkit.core.specs import TensorSpec
from ckptkit.quant.formats.part_names import (
    FP8_SCALE,
    FP8_SCALE_INV,
    GLOBAL_SCALE,
    INPUT_SCALES,
    MISTRAL_INPUT,
    MISTRAL_SCALE,
    MXFP4_BLOCKS,
    MXFP4_SCALES,
    SCALE_2,
)
from ckptkit.quant.formats.scheme import SCALE_DTYPES

Number = Literal["float8_e4m3fn", "float4_e2m1fn"]
Axes = Literal["grid", "row", "four", "groups"]
E4M3: Number = "float8_e4m3fn"
E2M1: Number = "float4_e2m1fn"
Block = tuple[int | None, int | None]
# The numbers of the codes of E2M1: a sign, two bits of exponent, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_NUMBERS = (*_E2M1, *(-number for number in _E2M1))
LARGEST: Mapping[str, float] = {E4M3: 448.0, E2M1: 6.0}
EXPONENTS = "float8_e8m0fnu"  # powers of two
FLOAT_SCALES = (*SCALE_DTYPES, EXPONENTS)
_WITH_POWERS = {False: FLOAT_SCALES, True: (*FLOAT_SCALES, "uint8")}
PACKED_GROUP = 16  # bytes of a group in gpt-oss's layout: 32 codes


@dataclass(frozen=True)
class Layout:
    """One spelling of a format. Endings follow the weight's name; one with a dot replaces its `.weight`."""

    words: str  # the format in a few words
    number: Number
    block: Block  # rows and columns that share a scale, or None for all of them
    scales: tuple[str, ...]  # endings of the scale's name, of which one is stored
    scale_dtypes: tuple[str, ...] = FLOAT_SCALES  # uint8: the exponents that float8_e8m0fnu stores
    codes: str = ""  # ending of the tensor of codes
    code_dtypes: tuple[str, ...] = (E4M3,)
    second: str = ""  # ending of the scale of the tensor, if it has one
    divides: bool = False  # whether that one divides
    inputs: tuple[str, ...] = ()  # endings of an activation's scale
    needs_input: bool = False  # whether an engine reads that scale
    axes: Axes = "grid"  # how scales are shaped, see `scale_shapes`
    only: str = ""  # ending of the modules that may be stored so

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Endings that only parts of a quantized weight have."""
        endings = (self.codes, *self.scales, self.second)
        # Plain parameters may also end in ".scale".
        return tuple(f".weight{one}" if one == "_scale" else one for one in endings if one not in ("", ".scale"))

    def weight(self, codes: str) -> str:
        """Returns the name of the weight that the tensor `codes` stores."""
        return codes.removesuffix(self.codes) if self.codes else codes

    def part_name(self, weight: str, ending: str) -> str:
        """Returns the name of a part of `weight`."""
        return weight.removesuffix(".weight") + ending if ending.startswith(".") else weight + ending

    def is_codes(self, spec: TensorSpec) -> bool:
        """Whether a tensor, by its name and dtype, holds codes of this layout."""
        if spec.dtype not in self.code_dtypes or not spec.name.endswith(self.codes):
            return False
        return self.weight(spec.name).removesuffix(".weight").endswith(self.only)

    def shape(self, codes: TensorSpec) -> tuple[int, ...] | None:
        """Returns the shape [..., rows, columns] of the weight, or None if the codes have another shape."""
        if self.axes == "groups":
            grouped = len(codes.shape) == 4 and codes.shape[-1] == PACKED_GROUP
            return (*codes.shape[:2], codes.shape[2] * 2 * PACKED_GROUP) if grouped else None
        if len(codes.shape) < 2:
            return None
        return codes.shape if self.number == E4M3 else (*codes.shape[:-1], codes.shape[-1] * 2)

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the number of blocks of a weight: [..., rows of blocks, columns of blocks]."""
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
        """Whether scales are powers of two and codes E4M3, as in OCP's Microscaling Formats."""
        return self.number == E4M3 and not set(self.scale_dtypes) & set(SCALE_DTYPES)

    @property
    def largest(self) -> float:
        """The largest code."""
        return LARGEST[self.number]

    @property
    def max_exponent(self) -> int:
        """The largest byte of a power of two that leaves every weight finite in bfloat16."""
        return 127 + 127 - math.frexp(self.largest)[1] + 1


_MX = 32  # weights that share a power of two
_POWERS = ("uint8", EXPONENTS)
_PACKED = "_packed"
_MXFP4 = "MXFP4 (4-bit floats, one power-of-two scale for each 32 weights)"
_MXFP8 = "MXFP8 (float8_e4m3fn, one power-of-two scale for each 32 weights)"


def _fp8(block: Block, *inputs: str, static: bool, scales: tuple[str, ...] = (FP8_SCALE,), **more: Any) -> Layout:
    """`inputs`: endings of scales of activations, which engines need if they are `static`."""
    rows, columns = block
    each = "tensor" if rows is None else "row" if columns is None else f"block of {rows} x {columns}"
    words = f"FP8 (float8_e4m3fn, one scale for each {each})"
    return Layout(words, E4M3, block, scales, inputs=inputs, needs_input=static, **more)


def fp8(block: Block, *, exponents: bool = False, static: bool = False, only: str = "") -> Layout:
    """`quant_method` fp8. `exponents`: uint8 scales are powers of two; `static`: activations have stored scales."""
    inputs = (*INPUT_SCALES, MISTRAL_INPUT) if static else ()
    scales = (FP8_SCALE_INV, FP8_SCALE, ".scale", MISTRAL_SCALE)
    return _fp8(block, *inputs, static=static, scales=scales, scale_dtypes=_WITH_POWERS[exponents], only=only)


def compressed_fp8(block: Block, *, static: bool = False) -> Layout:
    """compressed-tensors' `float-quantized`."""
    return _fp8(block, *((".input_scale", ".input_zero_point") if static else ()), static=static)


def modelopt_fp8(block: Block, *, static: bool = False) -> Layout:
    """ModelOpt's FP8, FP8_PER_CHANNEL_PER_TOKEN and FP8_PB_WO. Source: `qtensor/fp8_tensor.py` of nvidia-modelopt."""
    return _fp8(block, ".input_scale", static=static, axes="row" if block[1] is None else "four")


def quark_fp8(block: Block, *, static: bool = False) -> Layout:
    """Quark's fp8_e4m3."""
    axes = "row" if block[1] is None else "grid"
    return _fp8(block, ".input_scale", static=static, scale_dtypes=_WITH_POWERS[True], axes=axes)


def mxfp8(*scales: str) -> Layout:
    """MXFP8, with these endings of the scale's name."""
    return Layout(_MXFP8, E4M3, (1, _MX), scales or (FP8_SCALE_INV, FP8_SCALE), _POWERS)


_BYTES = ("int8", "uint8")  # int8 is refused in MXFP4_EXPERTS, by name
MXFP4_EXPERTS = Layout(_MXFP4, E2M1, (1, _MX), (MXFP4_SCALES,), ("uint8",), MXFP4_BLOCKS, _BYTES[::-1], axes="groups")
MXFP4_BYTES = Layout(
    _MXFP4, E2M1, (1, _MX), (".scale", FP8_SCALE_INV, FP8_SCALE), (EXPONENTS, "uint8", "float32"), "", _BYTES
)


def mxfp4(packed: bool) -> Layout:
    """MXFP4 with the names of compressed-tensors if `packed`, else of Quark and ModelOpt."""
    return Layout(_MXFP4, E2M1, (1, _MX), (FP8_SCALE,), _POWERS, _PACKED if packed else "", ("uint8",))


def _nvfp4(group: int, codes: str, second: str, inputs: str, **more: Any) -> Layout:
    words = f"NVFP4 (4-bit floats, one scale for each {group} weights and one for the tensor)"
    scales = (FP8_SCALE,), (E4M3,)
    return Layout(words, E2M1, (1, group), *scales, codes, ("uint8",), second, inputs=(inputs,), **more)


def modelopt_nvfp4(group: int = 16, *, static: bool = True) -> Layout:
    """NVFP4 as ModelOpt and miles store it. `static`: activations are NVFP4 too, with a stored scale."""
    return _nvfp4(group, "", SCALE_2, ".input_scale", needs_input=static)


def quark_nvfp4() -> Layout:
    """Quark's fp4 in groups of 16 below fp8_e4m3 of the tensor. Source: `schemes/quark_nvfp4.py` of vLLM 0.26."""
    return _nvfp4(16, "", SCALE_2, ".input_scale_2", needs_input=True)


def compressed_nvfp4(*, static: bool = True) -> Layout:
    """compressed-tensors' `nvfp4-pack-quantized`."""
    return _nvfp4(16, _PACKED, GLOBAL_SCALE, ".input_global_scale", needs_input=static, divides=True)


# One row of each spelling; its block does not matter.
_ROWS = (
    fp8((None, None), static=True),
    compressed_fp8((None, None), static=True),
    mxfp8(),
    MXFP4_EXPERTS,
    MXFP4_BYTES,
    mxfp4(packed=True),
    modelopt_nvfp4(),
    quark_nvfp4(),
    compressed_nvfp4(),
)
# Endings that only scales have, including those of activations.
SCALE_ENDINGS = tuple(dict.fromkeys(part for row in _ROWS for part in (*row.parts, *row.inputs) if part != row.codes))
_CODES = tuple(dict.fromkeys(row.codes for row in _ROWS if row.codes))
_SCALES = tuple(dict.fromkeys(scale for row in _ROWS for scale in row.scales))


def quantized_in(names: Iterable[str]) -> Iterator[str]:
    """Yields the modules with a weight in codes among these names, in any spelling of floats."""
    known = frozenset(names)
    for name in known:
        if name.endswith(_CODES):
            yield _stem(name, _CODES).removesuffix(".weight")
        elif name.endswith(_SCALES):
            stem = _stem(name, _SCALES)
            weight = f"{stem}.weight" if name[len(stem)] == "." else stem
            if any(weight + codes in known for codes in ("", *_CODES)):
                yield weight.removesuffix(".weight")


def _stem(name: str, endings: tuple[str, ...]) -> str:
    return next(name.removesuffix(ending) for ending in endings if name.endswith(ending))
