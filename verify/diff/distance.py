"""Measures how far two tensors of one shape are apart, piece by piece, so that float64 copies stay small."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_PIECE = 1 << 16  # elements: their float64 copies stay in a core's cache


@dataclass(frozen=True, slots=True)
class Distance:
    """How two tensors a and b differ, with d = a - b in float64."""

    elements: int
    unequal: int  # elements that differ in a bit, after a cast to the dtype that both are compared in
    not_finite: int  # unequal elements of which one is NaN or infinite
    largest: float  # max |d| of the other elements
    mean: float  # mean |d| of the other elements
    cosine: float | None  # of a and b as vectors; None where one of them is zero or not finite
    std: float  # standard deviation of a; NaN where a is not finite

    @property
    def relative(self) -> float:
        """Mean |d| in standard deviations of a; infinite where a is constant, or an unequal element is not finite."""
        return self.mean / self.std if self.std > 0 and not self.not_finite else math.inf


@dataclass
class _Sums:
    unequal: int = 0
    not_finite: int = 0
    largest: float = 0.0
    differences: float = 0.0
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # of a and b, and their product
    total: float = 0.0

    def add(self, a: Tensor, b: Tensor, unequal: Tensor) -> None:
        """Adds a piece: both sides in float64, and which of their elements are unequal."""
        d = (a - b).abs_()
        largest = float(d.max())
        if not math.isfinite(largest):
            finite = d.isfinite()
            self.not_finite += int((unequal & ~finite).sum())
            d = d[finite]
            largest = float(d.max()) if d.numel() else 0.0
        self.unequal += int(unequal.count_nonzero())
        self.largest = max(self.largest, largest)
        self.differences += float(d.sum())
        self.total += float(a.sum())
        for index, (one, other) in enumerate(((a, a), (b, b), (a, b))):
            self.squares[index] += float(one @ other)


def distance(a: Tensor, b: Tensor) -> Distance:
    """The distance of two contiguous tensors of one shape, of any dtypes."""
    import torch

    sums = _Sums()
    for left, right in zip(_pieces(a), _pieces(b), strict=True):
        wide = left.to(torch.float64), right.to(torch.float64)
        sums.add(*wide, _unequal(left, right))
    aa, bb, ab = sums.squares
    count = max(1, a.numel() - sums.not_finite)
    length = math.sqrt(aa) * math.sqrt(bb) if aa >= 0 and bb >= 0 else math.nan
    variance = aa / a.numel() - (sums.total / a.numel()) ** 2 if a.numel() else 0.0
    return Distance(
        elements=a.numel(),
        unequal=sums.unequal,
        not_finite=sums.not_finite,
        largest=sums.largest,
        mean=sums.differences / count,
        cosine=max(-1.0, min(1.0, ab / length)) if 0 < length < math.inf else None,
        std=math.sqrt(max(0.0, variance)) if math.isfinite(variance) else math.nan,
    )


def _pieces(tensor: Tensor) -> list[Tensor]:
    import torch

    if not tensor.numel():
        return []  # torch.split makes an empty piece, which has no maximum
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return list(torch.split(real.reshape(-1), _PIECE))


def _unequal(a: Tensor, b: Tensor) -> Tensor:
    """Which elements differ: in their bits, where both are of one dtype or can be cast to one; else as numbers."""
    from verify.evidence.extremes import as_integers

    if a.dtype == b.dtype:
        return as_integers(a) != as_integers(b)
    if (dtype := common_dtype(a, b)) is not None:
        return as_integers(a.to(dtype)) != as_integers(b.to(dtype))
    return a.double() != b.double()


def common_dtype(a: Tensor, b: Tensor) -> torch.dtype | None:
    """The narrower of the two dtypes, where both are floats of 16 bits or more and of different widths; else None."""
    import torch

    floats = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    if a.dtype not in floats or b.dtype not in floats or a.dtype.itemsize == b.dtype.itemsize:
        return None
    return min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
