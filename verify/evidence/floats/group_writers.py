"""Tells which program's formula made weights in MXFP8, MXFP4 and NVFP4, whose scales belong to groups of a row.

Formulas of one format agree on most groups and differ in how an exponent is rounded, in ties, and in groups of zeros.
Values are compared, so that the sign of a zero does not count. Sources: OCP Microscaling Formats 1.0, section 6.3;
TransformerEngine `float_to_e8m0`; nvidia-modelopt `mxfp4_tensor.py`, `nvfp4_tensor.py`; triton_kernels
`downcast_to_mxfp`; compressed-tensors `mxfp4_utils.py`, `calculate_qparams`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quant.formats.floats.layout import E4M3, Layout

if TYPE_CHECKING:
    from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_HALFWAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between two neighbours
_QUARTER, _EXPONENT = 0x200000, 0x7F800000  # of a float32: a quarter of its mantissa, the bits of its exponent
_SMALLEST = 2.0**-9  # of float8_e4m3fn

_MXFP8_UP = "the power of two above absmax/448, as TransformerEngine (so miles), ModelOpt and vLLM make it"
_MXFP8_EVEN = "the power of two nearest absmax, as compressed-tensors makes it"
_MXFP4_TO_ZERO = "the power of two above absmax/6, ties toward zero, as ModelOpt makes it"
_MXFP4_UP = "the power of two above absmax/6, ties to even, as triton_kernels makes it"
_MXFP4_EVEN = "the power of two nearest absmax, as compressed-tensors, Quark and vLLM make it"
_NVFP4_MODELOPT = "absmax / (6 x the tensor's scale), 1.0 for zeros, as ModelOpt makes it"
_NVFP4_PLAIN = "absmax / (6 x the tensor's scale), 0 for zeros, as TransformerEngine (so miles) and vLLM make it"
_NVFP4_COMPRESSED = "absmax/6 in bfloat16 x the tensor's scale, as compressed-tensors makes it"


def group_formulas(
    layout: Layout, numbers: Tensor, scales: Tensor, second: Tensor | None, original: Tensor
) -> list[str]:
    """The formulas that give exactly these numbers and scales of a weight.

    `numbers`: what the codes stand for, float32 [rows, columns]. `scales`: float32 [rows, groups], as stored. `second`:
    the scale of the tensor. `original`: [rows, columns], a float.
    """
    import torch

    width = layout.block[1] or original.shape[1]
    groups = original.reshape(len(original), -1, width)
    absmax = groups.abs().amax(-1)
    formulas = _nvfp4(layout, absmax, second) if second is not None else _powers(layout, absmax.float())
    found = []
    for name, scale, factor, to_zero in formulas:
        same = (scale == scales) | (absmax == 0) if second is None else scale == scales
        if not bool(same.all()):
            continue
        quotient = (groups.float() / factor.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)).flatten(-2)
        if torch.equal(_rounded(layout, quotient, to_zero=to_zero), numbers):
            found.append(name)
    return found


# Name, scales, what weights are divided by, and whether ties are rounded toward zero.
_Made = tuple[str, "Tensor", "Tensor", bool]


def _powers(layout: Layout, absmax: Tensor) -> Iterator[_Made]:
    import torch

    mantissa, exponent = torch.frexp(absmax / layout.largest)
    up = torch.ldexp(torch.ones_like(absmax), exponent - (mantissa == 0.5).to(exponent.dtype))
    below = ((absmax.contiguous().view(torch.int32) + _QUARTER) & _EXPONENT).view(torch.float32)
    # The largest power of two below the largest code: 2^8 of 448, 2^2 of 6.
    even = below / (256.0 if layout.number == E4M3 else 4.0)
    if layout.number == E4M3:
        yield _MXFP8_UP, up, up, False
        yield _MXFP8_EVEN, even, even, False
        return
    yield _MXFP4_TO_ZERO, up, up, True
    yield _MXFP4_UP, up, up, False
    yield _MXFP4_EVEN, even, even, False


def _nvfp4(layout: Layout, absmax: Tensor, second: Tensor) -> Iterator[_Made]:
    import torch

    whole, wide = second.float().reshape(()), absmax.float()
    if layout.divides:
        scale = ((absmax / 6).float() * whole).clamp(0, 448).to(torch.float8_e4m3fn).float()
        scale = torch.where(scale == 0, torch.full_like(scale, 0.125), scale)
        yield _NVFP4_COMPRESSED, scale, scale / whole, False
        return
    quotient = wide / (6 * whole)
    for name, least, zero in ((_NVFP4_MODELOPT, _SMALLEST, 1.0), (_NVFP4_PLAIN, 0.0, 0.0)):
        scale = quotient.clamp(least, 448).to(torch.float8_e4m3fn).float()
        scale = torch.where(wide == 0, torch.full_like(scale, zero), scale)
        yield name, scale, scale * whole, False


def _rounded(layout: Layout, quotient: Tensor, *, to_zero: bool) -> Tensor:
    """The numbers nearest to these, float32; ties to the even code, or toward zero."""
    import torch

    if layout.number == E4M3:
        return quotient.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    size, code = quotient.abs(), torch.zeros_like(quotient, dtype=torch.int64)
    for index, halfway in enumerate(_HALFWAY):
        # From an odd code up a tie goes to the even one above it.
        code += (size >= halfway) if index % 2 and not to_zero else (size > halfway)
    return torch.copysign(torch.tensor(_E2M1)[code], quotient)
