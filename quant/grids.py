"""Weights to INT4 codes and scales, on the two grids that are in use.

`minmax` is compressed-tensors' own grid: scale = absmax / 7.5 and code = round(clamp(w / scale, -8, 7)), every operation rounded
to the weight's dtype; a scale of zero becomes the dtype's epsilon. Source: compressed-tensors `calculate_qparams` and
`_quantize` on the CPU; on a GPU its kernel divides in float32 and may choose the other neighbour at a tie.

`qmax7` is the grid of quantization-aware training in slime, and of Kimi K2: scale = max(absmax * float32(1/7), 1e-5) and
code = round(w / scale), all in float32, so codes span -7..7; the scale is stored in the weight's dtype only afterwards.
Source: slime `fake_int4_quant_cuda.cu`, symmetric branch.

Rounding is half to even in both. absmax is over `group_size` neighbours along the input dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ckptkit.errors import CkptkitError
from quant.scheme import Grid

_SMALLEST_QMAX7_SCALE = 1e-5
_BLOCK = 1 << 20  # weights quantized at a time: float32 temporaries stay in the cache, whatever the matrix


def quantize(weight: Tensor, group_size: int, grid: Grid, name: str = "the weight") -> tuple[Tensor, Tensor]:
    """[rows, columns] -> codes int8 [rows, columns] in -8..7, scale [rows, columns / group_size] in the weight's dtype.

    Raises CkptkitError, naming the tensor, when a weight is not finite or the columns do not divide into groups.
    """
    rows, columns = weight.shape
    if columns % group_size:
        raise CkptkitError(f"{name}: {columns} input features do not divide into groups of {group_size}", "choose a smaller group or ignore the tensor")
    groups = weight.reshape(rows, -1, group_size)
    codes = torch.empty(groups.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(groups.shape[:2], dtype=weight.dtype, device=weight.device)
    step = max(1, _BLOCK // max(columns, 1))
    to_grid = _qmax7 if grid == "qmax7" else _minmax
    for start in range(0, rows, step):
        block = slice(start, start + step)
        absmax = groups[block].abs().amax(-1)
        if not torch.isfinite(absmax).all():
            raise CkptkitError(f"{name} holds NaN or infinity", "the source checkpoint is broken; nothing can be quantized from it")
        codes[block], scale[block] = to_grid(groups[block], absmax)
    return codes.flatten(1), scale


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """codes int8 [rows, columns], scale and zero point (int8) [rows, groups] -> weights [rows, columns] in the scale's dtype.

    (codes - zero point) x scale. Source: compressed-tensors `_dequantize`.
    """
    groups = codes.reshape(*scale.shape, -1).to(scale.dtype)
    if zero_point is not None:
        groups -= zero_point.to(scale.dtype).unsqueeze(-1)
    return (groups * scale.unsqueeze(-1)).flatten(-2)


def _minmax(groups: Tensor, absmax: Tensor) -> tuple[Tensor, Tensor]:
    scale = absmax / 7.5
    scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
    return (groups / scale.unsqueeze(-1)).clamp_(-8, 7).round_().to(torch.int8), scale


def _qmax7(groups: Tensor, absmax: Tensor) -> tuple[Tensor, Tensor]:
    seventh = torch.tensor(1 / 7, dtype=torch.float32, device=absmax.device)
    scale = (absmax.float() * seventh).clamp_(min=_SMALLEST_QMAX7_SCALE)
    return (groups.float() / scale.unsqueeze(-1)).round_().to(torch.int8), scale.to(groups.dtype)
