"""Compares two tensors: which elements and rows differ, and by how much."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptkit.core.specs import TensorSpec, ranges
from ckptkit.verify.evidence.extremes import as_integers

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_PIECE = 1 << 16  # elements: their float64 copies fit into a core's cache
_RUNS = 6  # runs of rows above which only the first is listed
_SHORT = 32  # elements of a row
_NEXT_TO_ZERO = 0.1  # of the median length of a row
_COUNTED = 1 << 16  # elements up to which distinct values are counted: router biases, not matrices


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """How a tensor differs from its source, with d = tensor - source in float64. Two shapes have no numbers."""

    source: TensorSpec
    actual: TensorSpec
    unequal: int  # elements that differ in a bit, in the dtype that both are compared in
    largest: float = math.nan  # max |d| of finite elements
    not_finite: int = 0  # unequal elements with a NaN or an infinity on one side
    mean: float = math.nan  # mean |d| of finite elements
    cosine: float | None = None  # of both as vectors, or None if one of them is zero or not finite
    std: float = math.nan  # standard deviation of the tensor, NaN if it is not finite
    rows: str = ""  # with unequal elements, `rows 3..5` or `row 7`; empty for all rows or none
    shift: int = 0  # 1 or -1 if the tensor is a vector and equals the rounded source + shift
    # Rows further from the source's row than zero is, which training does not do, except short ones and next to zero.
    unlike: int = 0
    unlike_rows: str = ""  # as `rows`
    distinct: tuple[int, int] = (0, 0)  # values of the source and of the tensor, if they are small and of two dtypes

    @property
    def same_shape(self) -> bool:
        """Whether both have one shape."""
        return self.source.shape == self.actual.shape

    @property
    def elements(self) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.actual.shape)

    @property
    def relative(self) -> float:
        """Mean |d| in standard deviations of the tensor; infinite if it is constant or not finite."""
        return self.mean / self.std if self.std > 0 and not self.not_finite else math.inf


def compare(name: str, tensor: Tensor, source: Tensor, dtype: torch.dtype | None) -> TensorDiff:
    """How `tensor` differs from `source` after a cast of both to `dtype`, or as numbers if that is None."""
    import torch

    specs = TensorSpec.of(name, source), TensorSpec.of(name, tensor)
    if tensor.shape != source.shape:
        return TensorDiff(*specs, tensor.numel())
    is_matrix, both = tensor.dim() > 1, (tensor, source)
    sums = torch.zeros(4, dtype=torch.float64)  # of squares of both, of products, and of the tensor
    unequal, not_finite, largest, total = 0, 0, 0.0, 0.0
    wrong_rows, norms = [torch.zeros(0, dtype=torch.bool)], [torch.zeros(2, 0, dtype=torch.float64)]
    here, there = (_rows(one) for one in both)
    dtype = here.dtype if tensor.dtype == source.dtype else dtype
    step = max(1, _PIECE // max(1, here.shape[1]))
    for start in range(0, len(here) if tensor.numel() else 0, step):
        pair = here[start : start + step], there[start : start + step]
        a, b = (one.to(torch.float64) for one in pair)
        wrong = a != b if dtype is None else as_integers(pair[0].to(dtype)) != as_integers(pair[1].to(dtype))
        d = a - b
        sizes = d.abs()
        if not math.isfinite(float(sizes.max())):
            finite = sizes.isfinite()
            not_finite += int((wrong & ~finite).sum())
            sizes = sizes[finite]
        unequal += int(wrong.count_nonzero())
        largest = max(largest, float(sizes.max()) if sizes.numel() else 0.0)
        total += float(sizes.sum())
        flat = [one.reshape(-1) for one in (a, b)]
        sums += torch.stack([flat[0] @ flat[0], flat[1] @ flat[1], flat[0] @ flat[1], a.sum()])
        if is_matrix:
            wrong_rows.append(wrong.any(dim=1))
            norms.append(torch.stack([d.norm(dim=1), b.norm(dim=1)]))
    is_float = tensor.is_floating_point() and source.is_floating_point()
    unlike = _unlike(torch.cat(norms, dim=1)) if is_float and here.shape[1] >= _SHORT else []
    rows = torch.cat(wrong_rows).nonzero().flatten().tolist()
    counted = tensor.dtype != source.dtype and tensor.numel() <= _COUNTED
    aa, bb, ab, sum_a = sums.tolist()
    count, length = max(1, tensor.numel()), math.sqrt(aa) * math.sqrt(bb) if aa >= 0 and bb >= 0 else math.nan
    variance = aa / count - (sum_a / count) ** 2
    return TensorDiff(
        *specs,
        unequal,
        largest,
        not_finite,
        mean=total / max(1, tensor.numel() - not_finite),
        cosine=max(-1.0, min(1.0, ab / length)) if 0 < length < math.inf else None,
        std=math.sqrt(max(0.0, variance)) if math.isfinite(variance) else math.nan,
        rows=_part_of(rows, tensor),
        shift=_shift(tensor, source),
        unlike=len(unlike),
        unlike_rows=_part_of(unlike, tensor),
        distinct=(_count_distinct(source), _count_distinct(tensor)) if counted else (0, 0),
    )


def common_dtype(a: Tensor, b: Tensor) -> torch.dtype | None:
    """The narrower of two float dtypes of different widths and at least 16 bits, else None."""
    import torch

    floats = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    if a.dtype not in floats or b.dtype not in floats or a.dtype.itemsize == b.dtype.itemsize:
        return None
    return min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)


def rows_named(rows: Collection[int]) -> str:
    """`rows 3..5,9` or `row 7`; of many runs only the first, with the number of rows."""
    text = ranges(rows).strip("{}")
    if text.count(",") >= _RUNS:
        return f"rows {text.partition(',')[0]} and others, {len(rows)} in all"
    return f"row{'s' * (len(rows) > 1)} {text}"


def _part_of(rows: Collection[int], tensor: Tensor) -> str:
    return rows_named(rows) if 0 < len(rows) < len(tensor) else ""


def _rows(tensor: Tensor) -> Tensor:
    import torch

    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.reshape(tensor.shape[0], -1) if tensor.dim() > 1 and tensor.numel() else real.reshape(-1, 1)


def _unlike(norms: Tensor) -> list[int]:
    """Rows that count as unlike, by `norms` [2, rows] of the differences and of the source's rows."""
    distance, length = norms
    return [int(row) for row in ((distance > length) & (length > _NEXT_TO_ZERO * length.median())).nonzero().flatten()]


def _shift(tensor: Tensor, source: Tensor) -> int:
    """1 or -1 if that was added to each element of a vector (norms that multiply by 1 + w), else 0."""
    if tensor.dim() != 1 or not tensor.is_floating_point():
        return 0
    return next((by for by in (1, -1) if bool(((source.float() + by).to(tensor.dtype) == tensor).all())), 0)


def _count_distinct(tensor: Tensor) -> int:
    return len(set(tensor.reshape(-1).tolist()))
