"""The packed INT4 weights of an HF checkpoint, and dequantizing one of them with compressed-tensors' own unpacking.

The bound on the error of a rounded weight, in steps (one step is the scale of its group):
- Inside the grid rounding is to the nearest code, so the error is at most 1/2.
- At the clamped end. qmax7 has scale absmax/7, so nothing is clamped. minmax has scale absmax/7.5 and codes -8..7: the
  largest positive weight stands at 7.5 and becomes 7, again 1/2; the largest negative one stands at -7.5 and becomes -8 or -7.
- Rounding on the way, with u the unit roundoff of the dtype that the quantizer computes and stores scales in (2^-8 for
  bfloat16). A rounded scale puts the end of the grid up to 7.5 u further out. A quotient weight/scale below 8 is rounded
  by up to half its spacing, 4 u. Together below 12 u.
- Asymmetric grids. Range and scale are each rounded: 30 u at the end of 15 steps. The quotient, below 16, takes 8 u, its
  sum with the zero point 4 u, the quotient that the zero point is rounded from at most 6 u more. Together 48 u.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckptkit.specs import TensorSpec
from verify.expected import PACKED, weights_of


@dataclass(frozen=True)
class Format:
    """What `quantization_config` says of the packed weights. `group` is in weights; None means one scale a row."""

    bits: int
    group: int | None
    symmetric: bool

    def groups(self, columns: int) -> int:
        """Scales a row of `columns` weights has."""
        return 1 if self.group is None else -(-columns // self.group)

    def words(self, columns: int) -> int:
        """int32 words that a row of `columns` weights takes."""
        return -(-columns * self.bits // 32)


def format_of(config: Mapping[str, Any]) -> Format | None:
    """The format of the first config group; None when `quantization_config` describes no packed integer weights."""
    weights = weights_of(config)
    bits, size = weights.get("num_bits"), weights.get("group_size")
    if not isinstance(bits, int) or weights.get("type", "int") != "int":
        return None
    group = size if isinstance(size, int) and size > 0 else None
    return Format(bits, group, weights.get("symmetric", True) is not False)


def packed_names(specs: Mapping[str, TensorSpec]) -> Iterator[str]:
    """Names of the modules whose weight is stored packed."""
    return (name.removesuffix(PACKED) for name in specs if name.endswith(PACKED))


def dequantized(parts: Mapping[str, Tensor], module: str, form: Format, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """float32 weights [rows, groups, group] and scales [rows, groups] of one module; a last group that is short ends in zeros."""
    # Imported here because it brings transformers with it, which takes seconds that checks of plain checkpoints do not need.
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    codes = grouped(unpack_from_int32(parts[f"{module}.weight_packed"], form.bits, torch.Size(shape)).float(), form)
    scale = parts[f"{module}.weight_scale"].float()
    if not form.symmetric:
        size = torch.Size((shape[0], form.groups(shape[1])))
        codes = codes - unpack_from_int32(parts[f"{module}.weight_zero_point"], form.bits, size, packed_dim=0).unsqueeze(-1)
    return codes * scale.unsqueeze(-1), scale


def grouped(weight: Tensor, form: Format) -> Tensor:
    """[rows, columns] as [rows, groups, group], the last group filled up with zeros."""
    rows, columns = weight.shape
    group = form.group or columns
    short = -columns % group
    return (torch.nn.functional.pad(weight, (0, short)) if short else weight).reshape(rows, -1, group)


def bound_in_steps(dtype: torch.dtype, symmetric: bool) -> float:
    """The largest error of a correctly rounded weight, in steps, where scales are stored in `dtype`; derived at the top."""
    unit_roundoff = torch.finfo(dtype).eps / 2
    return 0.5 + (12 if symmetric else 48) * unit_roundoff


def worst_steps(parts: Mapping[str, Tensor], module: str, form: Format, original: Tensor) -> float:
    """The largest distance of a dequantized weight from `original` [rows, columns], in steps of its own group.

    Groups whose scale is not a positive number are left out; CK304 names them.
    """
    weights, scale = dequantized(parts, module, form, tuple(original.shape))
    short = weights.shape[1] * weights.shape[2] - original.shape[1]
    error = (grouped(original.float(), form) - weights).abs()
    if short:
        error[:, -1, -short:] = 0
    steps = (error.amax(dim=-1) / scale)[scale.isfinite() & (scale > 0)]
    return float(steps.max()) if steps.numel() else 0.0
