"""Quantizes weights with the scales of the INT4 checkpoint they came from: unchanged groups keep their bits.

A group keeps its scale as long as that scale gives its weights. A fresh scale could move weights that nobody changed:
it follows from the group's largest weight, which need not lie at the end of the grid that it was rounded to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.side_files import quantization_of
from quant.formats.grids import check, dequantize
from quant.formats.packing import pack, pack_zero_point, unpack_zero_point
from quant.formats.part_names import PACKED, SCALE, ZERO_POINT
from quant.formats.scheme import GRIDS, KEPT_SCALES, Grid, QuantScheme, parse
from quant.kernels.dispatch import Packed, quantize_pack

_BLOCK = 1 << 20  # weights at a time: temporaries stay in the cache


@dataclass(frozen=True)
class StoredScheme:
    """What the config of an INT4 checkpoint says about its scales."""

    group_size: int | None  # None: one scale a row
    symmetric: bool
    grid: Grid | None = None  # None: another tool wrote the config
    scale_dtype: torch.dtype | None = None  # None: the weight's own
    kept_scales: bool = False  # scales of another grid may be among them

    def fits(self, scheme: QuantScheme) -> bool:
        """Whether scales cover the same groups of weights as in `scheme`."""
        return (self.group_size, self.symmetric) == (scheme.group_size, scheme.symmetric)

    def has_others(self, scheme: QuantScheme) -> bool:
        """Whether scales kept from here may be of another grid than that of `scheme`."""
        return self.kept_scales or self.grid != scheme.grid


def stored_scheme(config: Mapping[str, Any]) -> StoredScheme | None:
    """Reads what a whole config.json says about INT4 scales; None when the weights are not INT4.

    Raises CkptkitError for a quantization that ckptkit cannot read.
    """
    from quant.formats.dequantize import format_of
    from quant.formats.int4 import PackedInt4

    if quantization_of(config) is None or not isinstance(form := format_of(config), PackedInt4):
        return None
    weights = next(iter(parse(quantization_of(config)).config_groups.values())).weights
    grid = weights.observer_kwargs.get("grid")
    kept_scales = weights.observer_kwargs.get(KEPT_SCALES) is True
    known = grid if grid in GRIDS else None
    return StoredScheme(form.group, form.symmetric, known, weights.scale_dtype, kept_scales)


def stored_parts(reference: Checkpoint, module: str, symmetric: bool) -> Packed | None:
    """Reads the packed parts of a module from an INT4 checkpoint; None when the module is not packed.

    Raises CkptkitError when a part is missing.
    """
    names = [module + part for part in (PACKED, SCALE, *([] if symmetric else [ZERO_POINT]))]
    if names[0] not in reference.specs:
        return None
    if missing := [name for name in names if name not in reference.specs]:
        raise CkptkitError(
            f"the reference has {names[0]} but no {missing[0]}",
            "download the missing shard, or leave the reference out",
        )
    found = [*reference.read(names).values()]
    return Packed(found[0], found[1], None if symmetric else found[2])


def requantize(weight: Tensor, before: Packed, scheme: QuantScheme, name: str) -> Packed:
    """Packs [rows, columns]; groups that the scales and zero points of `before` reproduce keep them.

    A group keeps its scale when (code - zero point) x scale, with code = round(w / scale) + zero point in -8..7, equals
    each of its weights in the weight's dtype. The sign of a zero does not count: no code holds it. Other groups get
    fresh scales. Scales are stored in the scheme's dtype, or in that of `before` if the scheme has none.
    Raises CkptkitError as `quantize_pack` does, and when `before` has other groups.
    """
    scheme = replace(scheme, scale_dtype=scheme.scale_dtype or before.scale.dtype)
    check(weight, scheme, name)
    rows, columns = weight.shape
    if before.scale.shape != (rows, scheme.groups(columns)):
        wanted = [rows, scheme.groups(columns)]
        raise CkptkitError(
            f"{name}: the reference has scales {list(before.scale.shape)}, not {wanted}",
            "give a reference of the same model",
        )
    scale = before.scale.to(device=weight.device, dtype=scheme.scale_dtype)
    zero_point = (
        None
        if before.zero_point is None
        else unpack_zero_point(before.zero_point.to(weight.device), before.scale.shape)
    )
    codes, reused = _codes(weight, scale, zero_point, scheme)
    if bool(reused.all()):
        return Packed.of(codes, scale, zero_point)
    (fresh,) = quantize_pack([weight], scheme, [name])
    own, new = (words.reshape(*reused.shape, -1) for words in (pack(codes), fresh.words))
    words = torch.where(reused.unsqueeze(-1), own, new)
    scale = torch.where(reused, scale, fresh.scale)
    if zero_point is not None and fresh.zero_point is not None:
        zero_point = torch.where(reused, zero_point, unpack_zero_point(fresh.zero_point, reused.shape))
    return Packed(words.flatten(1), scale, None if zero_point is None else pack_zero_point(zero_point))


def _codes(weight: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: QuantScheme) -> tuple[Tensor, Tensor]:
    """Returns codes int8 [rows, columns] for these scales, and bool [rows, groups]: which groups they reproduce."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    reused = torch.ones(scale.shape, dtype=torch.bool, device=weight.device)
    size = scheme.group_size or weight.shape[1]
    step = max(1, _BLOCK // max(weight.shape[1], 1))
    for start in range(0, weight.shape[0] if weight.numel() else 0, step):
        block = slice(start, start + step)
        zero = None if zero_point is None else zero_point[block]
        groups = weight[block].reshape(-1, reused.shape[1], size)
        quotient = groups.float() / scale[block].float().unsqueeze(-1)
        exact = quotient.round_() if zero is None else quotient.round_().add_(zero.unsqueeze(-1))
        codes[block] = exact.nan_to_num_(nan=0.0).clamp_(-8, 7).to(torch.int8).flatten(1)
        meant = dequantize(codes[block], scale[block], zero).to(weight.dtype)
        reused[block] = (meant.reshape(groups.shape) == groups).all(-1) & scale[block].isfinite() & (scale[block] != 0)
    return codes, reused
