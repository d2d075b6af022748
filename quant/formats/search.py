"""Searches for a narrower range: clipping the largest weights may lower the rounding error of the others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

STEPS, GRID, NORM = 20, 100, 2.4


def shrunken(
    groups: Tensor, low: Tensor, high: Tensor, rounded: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns, for each group, the range with the smallest rounding error.

    `groups`: [rows, groups, size]; `low`, `high` and the result: [rows, groups]. `rounded(low, high)` rounds the groups
    to the grid of a range. The range is multiplied by 1, 0.99, ... 0.81; the first with the smallest sum of
    |rounded - weight| ** 2.4 wins. Source: llm-compressor's `memoryless_mse` observer with its defaults. That one sums
    in the weight's dtype and stops after five steps that help no group. Here sums are float64, so that their order does
    not matter, and every step is tried.
    """
    best_low, best_high = low, high
    least = torch.full(low.shape, torch.inf, dtype=torch.float64, device=low.device)
    exact = groups.double()
    for step in range(STEPS):
        share = 1 - step / GRID
        narrow_low, narrow_high = low * share, high * share
        error = (rounded(narrow_low, narrow_high).double() - exact).abs_().pow_(NORM).sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        best_low, best_high = torch.where(better, narrow_low, best_low), torch.where(better, narrow_high, best_high)
    return best_low, best_high
