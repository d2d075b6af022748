"""FP8 weights with a scale for each block, compared by the numbers that they stand for.

Some kernels want scales that are powers of two (DeepGEMM's UE8M0), so engines round such weights once more after
loading. That is not a fault of the checkpoint or of the load; the report says how far it moves weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quant.formats.floats.decode import codes_and_scales
from verify.witnesses.loading.bits import unequal
from verify.witnesses.loading.layouts.layout import Difference, Expected, Layout, Outcome, own_parameters

_LARGEST = 448.0  # of float8_e4m3fn
_SMALLEST = 1e-4  # DeepGEMM takes no block's largest value for smaller
_ROUNDING = 2**-20  # of a scale, computed in float32


def fp8_blocks(block: tuple[int, int], pairs: Sequence[tuple[str, str]]) -> Layout:
    """FP8 weights [..., rows, columns] whose codes and scales are as loaded, or rounded to other scales.

    `pairs`: the names of each weight and its scales [..., rows / block, columns / block].
    """

    def expect(module: nn.Module) -> Expected:
        own = own_parameters(module)
        before = {pair: tuple(own[name].clone() for name in pair) for pair in pairs}

        def compare() -> Outcome:
            outcome = Outcome()
            for (name, scale_name), (codes, scales) in before.items():
                now = [getattr(module, one).detach() for one in (name, scale_name)]
                if [(one.shape, one.dtype) for one in now] != [(one.shape, one.dtype) for one in (codes, scales)]:
                    outcome.unknown = f"{scale_name} has a layout of its kernel's own"
                    continue
                for expert in range(len(codes)) if codes.dim() == 3 else [None]:
                    was, found = (
                        [one if expert is None else one[expert] for one in several]
                        for several in ((codes, scales), now)
                    )
                    if wrong := _wrong(block, was, found):
                        outcome.differences.append(Difference(name, wrong, expert))
                    elif change := _change(block, was, found):
                        outcome.requantized[name] = max(change, outcome.requantized.get(name, 0.0))
            return outcome

        return Expected(frozenset(name for pair in pairs for name in pair), compare)

    return expect


def _wrong(block: tuple[int, int], was: Sequence[Tensor], found: Sequence[Tensor]) -> str | None:
    """What is wrong with a matrix: codes that are not the loaded values in their scales, or unfit scales."""
    codes, factors = codes_and_scales(was[0], was[1], block)
    loaded = codes * factors
    now, new = codes_and_scales(found[0], found[1], block)
    same = ~unequal(new.contiguous(), factors.contiguous())
    wanted = torch.where(same, codes, (loaded / new).to(torch.float8_e4m3fn).float())
    fits = same | _fits(block, loaded, found[1], new)
    wrong = unequal(now, wanted) & ~((now == 0) & (wanted == 0)) | ~fits
    if not (count := int(wrong.sum())):
        return None
    row, column = wrong.nonzero()[0].tolist()
    value, wanted_value = (now * new)[row, column].item(), loaded[row, column].item()
    return f"{count} of {wrong.numel()} values differ, first at {[row, column]}: {value} instead of {wanted_value}"


def _fits(block: tuple[int, int], loaded: Tensor, scales: Tensor, new: Tensor) -> Tensor:
    """Where a new scale is a power of two that holds the largest value of its block, and not twice as large."""
    largest = _by_block(block, loaded.abs(), scales.shape).clamp(min=_SMALLEST) / _LARGEST
    needed = codes_and_scales(loaded, largest, block)[1]
    mantissa, _ = torch.frexp(new)
    return (mantissa == 0.5) & (new >= needed * (1 - _ROUNDING)) & (new <= 2 * needed * (1 + _ROUNDING))


def _by_block(block: tuple[int, int], values: Tensor, shape: torch.Size) -> Tensor:
    """The largest of each block: [rows, columns] -> `shape`."""
    height, width = block
    whole = values.new_zeros(shape[0] * height, shape[1] * width)
    whole[: values.shape[0], : values.shape[1]] = values
    return whole.view(shape[0], height, shape[1], width).amax((1, 3))


def _change(block: tuple[int, int], was: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """The largest change of a value, as a part of the largest value of its block; 0.0: none."""
    (codes, factors), (now, new) = (codes_and_scales(one[0], one[1], block) for one in (was, found))
    loaded = codes * factors
    largest = codes_and_scales(loaded, _by_block(block, loaded.abs(), was[1].shape), block)[1]
    return float(((now * new - loaded).abs() / largest.clamp(min=torch.finfo(torch.float32).tiny)).max())
