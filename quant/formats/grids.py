"""Quantizes weights to INT4 codes and scales in plain torch, on any device; the kernels give the same bits.

`minmax` is compressed-tensors' own grid.
Symmetric: scale = absmax / 7.5, code = round(clamp(w / scale, -8, 7)).
Asymmetric: low = min(w, 0), high = max(w, 0), scale = (high - low) / 15,
zero point = round(clamp(-8 - low / scale, -8, 7)), code = round(clamp(w / scale + zero point, -8, 7)).
Scale and zero point are computed in the weight's dtype, with every operation rounded to it. The scale is then rounded
to its stored dtype; a zero becomes that dtype's epsilon. The quotient is rounded to the wider of the two dtypes.
Source: compressed-tensors `calculate_qparams` and `_quantize` on the CPU. On a GPU its kernel divides in float32 and
may choose the other neighbour at a tie.

`qmax7` is the grid of quantization-aware training in slime, and of Kimi K2.
scale = max(absmax * float32(1/7), 1e-5) and code = round(w / scale), all in float32, so codes span -7..7.
Only then is the scale converted to its stored dtype.
Source: slime `fake_int4_quant_cuda.cu`, symmetric branch.

Both round half to even. Minima and maxima are over `group_size` neighbours along the input dimension, or over the row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.scheme import QuantScheme

SMALLEST_QMAX7_SCALE = 1e-5
_BLOCK = 1 << 20  # weights quantized at a time: float32 temporaries stay in the cache
_STEPS, _GRID, _NORM = 20, 100, 2.4  # of the search for a narrower range


class Codes(NamedTuple):
    """Codes int8 [rows, columns] in -8..7, scale [rows, groups], zero point int8 [rows, groups] in -8..7 or None."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None


def quantize(weight: Tensor, scheme: QuantScheme, name: str = "the weight") -> Codes:
    """Quantizes [rows, columns]. Raises CkptkitError, with the `name`, as `check`, and for a non-finite scale."""
    check(weight, scheme, name)
    rows, columns = weight.shape
    groups = weight.reshape(rows, scheme.groups(columns), scheme.group_size or columns)
    codes = torch.empty(groups.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(groups.shape[:2], dtype=scheme.scale_dtype or weight.dtype, device=weight.device)
    zero_point = None if scheme.symmetric else torch.zeros(groups.shape[:2], dtype=torch.int8, device=weight.device)
    step = max(1, _BLOCK // max(columns, 1))
    for start in range(0, rows if columns else 0, step):
        block = slice(start, start + step)
        codes[block], scale[block], zero = (
            _qmax7(groups[block], scale.dtype)
            if scheme.grid == "qmax7"
            else _minmax(groups[block], scheme, scale.dtype)
        )
        if zero_point is not None and zero is not None:
            zero_point[block] = zero
        # The weight is not finite, or the scale's dtype overflows.
        if not bool(torch.isfinite(scale[block]).all()):
            raise not_finite(weight[block], scale.dtype, name)
    if not columns:
        scale.fill_(torch.finfo(scale.dtype).eps)
    return Codes(codes.flatten(1), scale, zero_point)


def check_matrix(weight: Tensor, name: str) -> None:
    """Raises CkptkitError, naming the tensor, unless it is a float matrix."""
    if weight.ndim != 2 or weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        message = f"{name} is {list(weight.shape)} {str(weight.dtype).removeprefix('torch.')}, not quantizable"
        raise CkptkitError(message, "quantize only matrices in bfloat16, float16 or float32")


def check(weight: Tensor, scheme: QuantScheme, name: str) -> None:
    """Raises CkptkitError unless the weight is a float matrix with columns that divide into groups and words."""
    check_matrix(weight, name)
    if weight.shape[1] % scheme.divisor:
        parts = f"groups of {scheme.group_size}" if scheme.group_size else f"words of {scheme.divisor} codes"
        message = f"{name} has {weight.shape[1]} input features, which {parts} do not divide"
        raise CkptkitError(message, "choose a smaller group size, or exclude the tensor with --ignore")


def not_finite(weight: Tensor, dtype: torch.dtype, name: str) -> CkptkitError:
    """Returns the error for a weight, or a scale stored in `dtype`, that is not finite."""
    if not bool(torch.isfinite(weight).all()):
        return CkptkitError(
            f"{name} has NaN or infinity", "compare it with the release: the source checkpoint is damaged"
        )
    message = f"{name} has weights so large that a scale overflows {str(dtype).removeprefix('torch.')}"
    return CkptkitError(message, "quantize symmetrically, pass --scale-dtype float32, or exclude the tensor")


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """Returns the weights (codes - zero point) x scale, [rows, columns] in the scale's dtype.

    `codes`: int8 [rows, columns]. `scale`, `zero_point` (int8): [rows, groups].
    Source: compressed-tensors `_dequantize`.
    """
    groups = codes.reshape(*scale.shape, -1).to(scale.dtype)
    if zero_point is not None:
        groups -= zero_point.to(scale.dtype).unsqueeze(-1)
    return (groups * scale.unsqueeze(-1)).flatten(-2)


def _minmax(groups: Tensor, scheme: QuantScheme, stored: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    low, high = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
    if scheme.search == "mse":
        low, high = _shrunken(groups, low, high, scheme.symmetric, stored)
    scale, zero = _qparams(low, high, scheme.symmetric, stored)
    return _codes(groups, scale, zero).to(torch.int8), scale, zero


def _qparams(low: Tensor, high: Tensor, symmetric: bool, stored: torch.dtype) -> tuple[Tensor, Tensor | None]:
    # Divisors are tensors: for a number, CUDA multiplies by the rounded inverse.
    if symmetric:
        scale, zero = torch.maximum(-low, high) / torch.full_like(low, 7.5), None
    else:
        scale = (high - low) / torch.full_like(low, 15)
        # A group of zeros gives 0 / 0, which is NaN; its zero point is 0.
        zero = (-8 - low / scale).clamp_(-8, 7).round_().nan_to_num_(nan=0.0)
    scale = scale.to(stored)
    return torch.where(scale == 0, torch.finfo(stored).eps, scale), zero


def _codes(groups: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    quotient = groups / scale.unsqueeze(-1)
    if zero is not None:
        quotient += zero.unsqueeze(-1)
    return quotient.clamp_(-8, 7).round_()


def _qmax7(groups: Tensor, stored: torch.dtype) -> tuple[Tensor, Tensor, None]:
    absmax = groups.abs().amax(-1).float()
    scale = absmax * torch.tensor(1 / 7, dtype=torch.float32, device=absmax.device)
    scale.clamp_(min=SMALLEST_QMAX7_SCALE)
    return (groups.float() / scale.unsqueeze(-1)).round_().to(torch.int8), scale.to(stored), None


def _shrunken(groups: Tensor, low: Tensor, high: Tensor, symmetric: bool, stored: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the range (low, high) of each group that has the smallest rounding error; clipping may lower it.

    `groups`: [rows, groups, size]; `low`, `high` and the result: [rows, groups]. The range is multiplied by 1, 0.99,
    ... 0.81; the first with the smallest sum of |rounded - weight| ** 2.4 wins. Source: llm-compressor's
    `memoryless_mse` observer, which sums in the weight's dtype and stops after five steps without improvement. Here
    sums are float64, so that their order does not matter, and every step is tried.
    """
    best_low, best_high = low, high
    least = torch.full(low.shape, torch.inf, dtype=torch.float64, device=low.device)
    exact = groups.double()
    for step in range(_STEPS):
        share = 1 - step / _GRID
        narrow_low, narrow_high = low * share, high * share
        scale, zero = _qparams(narrow_low, narrow_high, symmetric, stored)
        codes = _codes(groups, scale, zero).to(scale.dtype)
        rounded = (codes if zero is None else codes - zero.to(scale.dtype).unsqueeze(-1)) * scale.unsqueeze(-1)
        error = (rounded.double() - exact).abs_().pow_(_NORM).sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        best_low, best_high = torch.where(better, narrow_low, best_low), torch.where(better, narrow_high, best_high)
    return best_low, best_high
