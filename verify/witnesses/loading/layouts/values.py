"""The numbers that a layer's parameters stand for, and layouts that are compared with them.

Some kernels want FP8 scales that are powers of two (DeepGEMM's UE8M0), so engines round such weights once more after
loading. That is not a fault of the checkpoint or of the load; the report says how far it moves weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ckptkit.quant.formats.floats.decode import codes_and_scales
from ckptkit.quant.formats.packing import unpack, unpack_zero_point
from ckptkit.quant.formats.part_names import FP8_SCALE, FP8_SCALE_INV, WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_ZERO_POINT
from ckptkit.verify.witnesses.loading.bits import first_wrong, unequal
from ckptkit.verify.witnesses.loading.layouts.layout import Compare, LayerOutcome, Layout, by_expert, own_parameters

# Of a step of INT4. Kernels multiply codes and zero points by the scale in bfloat16, which rounds each product of up to
# 15 steps by a 512th, and their sum once more; a wrong code is a whole step away.
_OF_A_STEP = 1 / 8
_OF_FP8 = 2**-7  # of a value in FP8, whose neighbours are a 16th or an 8th of it away; bfloat16 rounds by a 512th
_AT_ONCE = 1024  # inputs
_LARGEST = 448.0  # of float8_e4m3fn
_SMALLEST = 1e-4  # DeepGEMM takes no block's largest value for smaller
_ROUNDING = 2**-20  # of a scale, computed in float32


@dataclass(frozen=True)
class KernelValues:
    """A weight [outputs, inputs] in float32, and how far a kernel may be from it."""

    exact: Tensor
    within: Tensor  # of the same shape, or one that spreads to it


def values_of(own: Mapping[str, Tensor], block: tuple[int, int] | None = None) -> KernelValues | None:
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
        return KernelValues(exact, exact.abs() * _OF_FP8)
    return KernelValues(weight.float(), torch.zeros((), device=weight.device)) if weight.dtype.itemsize > 1 else None


def _of_int4(own: Mapping[str, Tensor]) -> KernelValues | None:
    words, scales = own[WEIGHT_PACKED], own[WEIGHT_SCALE].float()
    if words.dim() != 2:
        return None
    codes = unpack(words, (len(words), words.shape[1] * 8)).float()
    if WEIGHT_ZERO_POINT in own:
        zero_points = unpack_zero_point(own[WEIGHT_ZERO_POINT], tuple(scales.shape)).float()
        codes -= zero_points.repeat_interleave(codes.shape[1] // zero_points.shape[1], 1)
    steps = scales.repeat_interleave(codes.shape[1] // scales.shape[1], 1)
    return KernelValues(codes * steps, steps.abs() * _OF_A_STEP)


def products(run: Callable[[Tensor], Tensor], dtype: torch.dtype, block: tuple[int, int] | None = None) -> Layout:
    """The weight of a Linear layer in a layout that only its kernel knows, compared by what the kernel computes.

    `run` computes outputs [n, outputs] of inputs [n, inputs] in `dtype`, without a bias. Each input is 1 in one place
    and 0 elsewhere, so that its outputs are a column of the weight.
    """

    def expect(module: nn.Module) -> tuple[Collection[str], Compare]:
        own = own_parameters(module)
        names = [name for name in own if name.startswith("weight")]
        weight, values = WEIGHT_PACKED if WEIGHT_PACKED in own else "weight", values_of(own, block)

        def compare() -> LayerOutcome:
            if values is None:
                return LayerOutcome(unknown="its kernel has a layout of its own")
            what = _unlike(values, run, dtype)
            return LayerOutcome({weight: what} if what else {})

        return names, compare

    return expect


def _unlike(values: KernelValues, run: Callable[[Tensor], Tensor], dtype: torch.dtype) -> str | None:
    outputs, inputs = values.exact.shape
    several = torch.split(torch.arange(inputs, device=values.exact.device), _AT_ONCE)
    units = (nn.functional.one_hot(some, inputs).to(dtype) for some in several)
    columns = torch.cat([run(some)[:, :outputs].float() for some in units]).t()
    wrong = ~((columns - values.exact).abs() <= values.within)  # NaN too
    return first_wrong(wrong, columns, values.exact, "elements differ from the kernel's result")


def absorbed(layer: nn.Module, heads: int, rows: int, block: tuple[int, int] | None = None) -> Layout:
    """The two matrices that latent attention makes of its `kv_b_proj`, [heads x (rows + values), latent], after it.

    `W_UK_T` [heads, rows, latent] has the first `rows` of each head, and `W_UV` [heads, latent, values] the others.
    """
    own = own_parameters(layer)
    packed = {name: tensor.clone() for name, tensor in own.items()} if WEIGHT_PACKED in own else None

    def expect(module: nn.Module) -> tuple[Collection[str], Compare]:
        def compare() -> LayerOutcome:
            # A plain weight stays as it is; FP8 may have been rounded again, which is compared there.
            values = values_of(packed or own_parameters(layer), block)
            if values is None:
                return LayerOutcome(unknown="its treatment of kv_b_proj is not known")
            parts = [
                one.expand(values.exact.shape).reshape(heads, -1, values.exact.shape[1])
                for one in (values.exact, values.within)
            ]
            up, value = ([one[:, :rows] for one in parts], [one[:, rows:].transpose(1, 2) for one in parts])
            return LayerOutcome(dict([*_beyond(module, "W_UK_T", *up), *_beyond(module, "W_UV", *value)]))

        return ("W_UK_T", "W_UV"), compare

    return expect


def _beyond(module: nn.Module, name: str, wanted: Tensor, within: Tensor) -> Iterator[tuple[str, str]]:
    found = getattr(module, name).detach().float()
    if found.shape != wanted.shape:
        yield name, f"shape {list(found.shape)} instead of {list(wanted.shape)}"
    elif what := first_wrong(~((found - wanted).abs() <= within), found, wanted, "elements differ from kv_b_proj's"):
        yield name, what


def fp8_blocks(block: tuple[int, int], pairs: Sequence[tuple[str, str]]) -> Layout:
    """FP8 weights [..., rows, columns] whose codes and scales are as loaded, or rounded to other scales.

    `pairs`: the names of each weight and its scales [..., rows / block, columns / block].
    """

    def expect(module: nn.Module) -> tuple[Collection[str], Compare]:
        own = own_parameters(module)
        before = {pair: tuple(own[name].clone() for name in pair) for pair in pairs}

        def compare() -> LayerOutcome:
            outcome = LayerOutcome()
            for (name, scale_name), (codes, scales) in before.items():
                now = [getattr(module, one).detach() for one in (name, scale_name)]
                if [(one.shape, one.dtype) for one in now] != [(one.shape, one.dtype) for one in (codes, scales)]:
                    outcome.unknown = f"{scale_name} has a layout of its kernel's own"
                    continue
                for place, matrices in by_expert(name, codes, scales, *now):
                    was, found = matrices[:2], matrices[2:]
                    if wrong := _wrong_codes(block, was, found):
                        outcome.differences[place] = wrong
                    elif change := _change(block, was, found):
                        outcome.requantized[name] = max(change, outcome.requantized.get(name, 0.0))
            return outcome

        return [name for pair in pairs for name in pair], compare

    return expect


def _wrong_codes(block: tuple[int, int], was: Sequence[Tensor], found: Sequence[Tensor]) -> str | None:
    """What is wrong with a matrix: codes that are not the loaded values in their scales, or unfit scales."""
    codes, factors = codes_and_scales(was[0], was[1], block)
    loaded = codes * factors
    now, new = codes_and_scales(found[0], found[1], block)
    same = ~unequal(new.contiguous(), factors.contiguous())
    wanted = torch.where(same, codes, (loaded / new).to(torch.float8_e4m3fn).float())
    fits = same | _fits(block, loaded, found[1], new)
    wrong = unequal(now, wanted) & ~((now == 0) & (wanted == 0)) | ~fits
    return first_wrong(wrong, now * new, loaded, "values differ")


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
