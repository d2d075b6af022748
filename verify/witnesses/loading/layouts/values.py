"""The numbers that a layer's parameters stand for, and layouts that are compared with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quant.formats.floats.decode import codes_and_scales
from quant.formats.packing import unpack, unpack_zero_point
from quant.formats.part_names import FP8_SCALE, FP8_SCALE_INV, WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_ZERO_POINT
from verify.witnesses.loading.layouts.layout import Difference, Expected, Layout, Outcome, own_parameters

# Of a step of INT4. Kernels multiply codes and zero points by the scale in bfloat16, which rounds each product of up to
# 15 steps by a 512th, and their sum once more; a wrong code is a whole step away.
_OF_A_STEP = 1 / 8
_OF_FP8 = 2**-7  # of a value in FP8, whose neighbours are a 16th or an 8th of it away; bfloat16 rounds by a 512th
_AT_ONCE = 1024  # inputs


@dataclass(frozen=True)
class Values:
    """A weight [outputs, inputs] in float32, and how far a kernel may be from it."""

    exact: Tensor
    within: Tensor  # of the same shape, or one that spreads to it


def values_of(own: Mapping[str, Tensor], block: tuple[int, int] | None = None) -> Values | None:
    """What a Linear layer's parameters stand for, as they are loaded; None for a form that is not known here.

    Packed INT4 in compressed-tensors' layout, FP8 with a scale for each `block`, or a plain weight.
    """
    if WEIGHT_PACKED in own:
        return _of_int4(own)
    weight = own.get("weight")
    scales = next((own[name] for end in (FP8_SCALE_INV, FP8_SCALE) if (name := f"weight{end}") in own), None)
    if weight is None:
        return None
    if weight.dtype is torch.float8_e4m3fn and scales is not None and block is not None:
        rows, columns = (-(-size // side) for size, side in zip(weight.shape, block, strict=True))
        if scales.shape != (rows, columns) or not scales.is_floating_point():
            return None
        codes, factors = codes_and_scales(weight, scales, block)
        exact = codes * factors
        return Values(exact, exact.abs() * _OF_FP8)
    return Values(weight.float(), torch.zeros((), device=weight.device)) if weight.dtype.itemsize > 1 else None


def _of_int4(own: Mapping[str, Tensor]) -> Values | None:
    words, scales = own[WEIGHT_PACKED], own[WEIGHT_SCALE].float()
    if words.dim() != 2:
        return None
    codes = unpack(words, (len(words), words.shape[1] * 8)).float()
    if WEIGHT_ZERO_POINT in own:
        zero_points = unpack_zero_point(own[WEIGHT_ZERO_POINT], tuple(scales.shape)).float()
        codes -= zero_points.repeat_interleave(codes.shape[1] // zero_points.shape[1], 1)
    steps = scales.repeat_interleave(codes.shape[1] // scales.shape[1], 1)
    return Values(codes * steps, steps.abs() * _OF_A_STEP)


def products(run: Callable[[Tensor], Tensor], dtype: torch.dtype, block: tuple[int, int] | None = None) -> Layout:
    """The weight of a Linear layer in a layout that only its kernel knows, compared by what the kernel computes.

    `run` computes outputs [n, outputs] of inputs [n, inputs] in `dtype`, without a bias. Each input is 1 in one place
    and 0 elsewhere, so that its outputs are a column of the weight.
    """

    def expect(module: nn.Module) -> Expected:
        own = own_parameters(module)
        names = [name for name in own if name.startswith("weight")]
        weight, values = WEIGHT_PACKED if WEIGHT_PACKED in own else "weight", values_of(own, block)

        def compare() -> Outcome:
            if values is None:
                return Outcome(unknown="its kernel has a layout of its own")
            return Outcome([Difference(weight, what) for what in _unlike(values, run, dtype)])

        return Expected(frozenset(names), compare)

    return expect


def _unlike(values: Values, run: Callable[[Tensor], Tensor], dtype: torch.dtype) -> list[str]:
    outputs, inputs = values.exact.shape
    within = values.within.expand(values.exact.shape)
    count, first = 0, None
    for begin in range(0, inputs, _AT_ONCE):
        end = min(begin + _AT_ONCE, inputs)
        ones = torch.zeros(end - begin, inputs, dtype=dtype, device=values.exact.device)
        ones[torch.arange(end - begin), torch.arange(begin, end)] = 1
        columns = run(ones)[:, :outputs].float().t()
        wrong = ~((columns - values.exact[:, begin:end]).abs() <= within[:, begin:end])  # NaN too
        count += int(wrong.sum())
        if first is None and wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            first = row, begin + column, columns[row, column].item(), values.exact[row, begin + column].item()
    if first is None:
        return []
    row, column, found, wanted = first
    return [
        f"{count} of {outputs * inputs} elements differ by what the kernel computes, first at {[row, column]}: "
        f"{found} instead of {wanted}"
    ]


def absorbed(layer: nn.Module, heads: int, rows: int, block: tuple[int, int] | None = None) -> Layout:
    """The two matrices that latent attention makes of its `kv_b_proj`, [heads x (rows + values), latent], after it.

    `W_UK_T` [heads, rows, latent] has the first `rows` of each head, and `W_UV` [heads, latent, values] the others.
    """
    own = own_parameters(layer)
    packed = {name: tensor.clone() for name, tensor in own.items()} if WEIGHT_PACKED in own else None

    def expect(module: nn.Module) -> Expected:
        def compare() -> Outcome:
            # A plain weight stays as it is; FP8 may have been rounded again, which is compared there.
            values = values_of(packed or own_parameters(layer), block)
            if values is None:
                return Outcome(unknown="what it makes of kv_b_proj is not known")
            parts = [
                one.expand(values.exact.shape).reshape(heads, -1, values.exact.shape[1])
                for one in (values.exact, values.within)
            ]
            up, value = ([one[:, :rows] for one in parts], [one[:, rows:].transpose(1, 2) for one in parts])
            return Outcome([*_beyond(module, "W_UK_T", *up), *_beyond(module, "W_UV", *value)])

        return Expected(frozenset(("W_UK_T", "W_UV")), compare)

    return expect


def _beyond(module: nn.Module, name: str, wanted: Tensor, within: Tensor) -> Iterator[Difference]:
    found = getattr(module, name).detach().float()
    if found.shape != wanted.shape:
        yield Difference(name, f"shape {list(found.shape)} instead of {list(wanted.shape)}")
    elif count := int((wrong := ~((found - wanted).abs() <= within)).sum()):
        at = tuple(wrong.nonzero()[0].tolist())
        what = f"{count} of {wrong.numel()} elements differ from kv_b_proj's, first at {list(at)}: "
        yield Difference(name, f"{what}{found[at].item()} instead of {wanted[at].item()}")
