"""Whether weights were trained: training makes rows and columns of a matrix differ in size, random numbers do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Standard deviations from what random numbers give, in the median of all matrices: trained models have 23 to 460.
UNTRAINED = 6.0
_MIN_NUMBERS, _MIN_COUNTED = 4, 32
_TINY = 1e-30


def structure(matrix: Tensor) -> float | None:
    """How much more the sizes of rows and columns vary than those of independent normal numbers would.

    `matrix` is [rows, columns] of any float dtype. In standard deviations, added up over the two axes; or None if the
    matrix is too small to tell or holds numbers that are not finite.
    """
    import torch

    if matrix.dim() != 2 or matrix.shape[1] < _MIN_COUNTED or matrix.shape[0] < _MIN_NUMBERS:
        return None
    found = []
    for axis, numbers in ((1, matrix.shape[1]), (0, matrix.shape[0])):
        squares = torch.linalg.vector_norm(matrix, dim=axis, dtype=torch.float32).square() / numbers
        sizes = squares.clamp_min(_TINY).log().double()
        if not sizes.isfinite().all():
            return None
        found.append((float(sizes.var(unbiased=False)) / _spread(numbers) - 1) * ((len(sizes) - 1) / 2) ** 0.5)
    return float(sum(found) / len(found) ** 0.5)


def _spread(numbers: int) -> float:
    """The variance of the logarithm of the mean square of normal numbers: trigamma(numbers / 2)."""
    half, total = numbers / 2, 0.0
    while half < 6:
        total, half = total + half**-2, half + 1
    return total + 1 / half + 1 / (2 * half**2) + 1 / (6 * half**3)
