"""The search for a range narrower than the weights' own, which clips the largest to round all others less."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

STEPS, GRID, NORM = 20, 100, 2.4


def shrunken(
    groups: Tensor, low: Tensor, high: Tensor, rounded: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """groups [rows, groups, size], their least and largest weights [rows, groups] -> the range whose rounding errs least.

    `rounded` gives the groups rounded to the grid of a range. Of the ranges multiplied by 1, 0.99, ... 0.81 the first one with the
    smallest sum of |rounded - weight| ** 2.4 is chosen for each group. Source: llm-compressor's `memoryless_mse` observer with its defaults,
    which sums errors in the weight's dtype and stops after five steps that help no group; here they are summed in float64, so that the
    order of summation decides nothing, and every step is tried.
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
