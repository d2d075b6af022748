"""The protocol of a layout, and layouts that are independent of a kernel.

Some kernels need FP8 scales that are powers of two (DeepGEMM's UE8M0), so engines round such weights once more after
loading. This is no fault of the checkpoint or of the load; the report has the change of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ckptkit.quant.formats.floats.decode import codes_and_scales
from ckptkit.quant.formats.packing import unpack, unpack_zero_point
from ckptkit.quant.formats.part_names import FP8_SCALE, FP8_SCALE_INV, WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_ZERO_POINT
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.witnesses.loading.bits import difference, first_wrong, unequal
from ckptkit.verify.witnesses.loading.job import Observation

# Yields faults and changes of parameters by their names in the layer; NAME[2] is expert 2 of all experts. Raises
# CannotCheck for a parameter in an unknown layout, after the others.
Compare = Callable[[], Iterator[Observation]]
# Copies a layer's parameters before repacking. Returns the names that it covers (none if unknown), and the comparison.
Layout = Callable[[nn.Module], tuple[Collection[str], Compare]]


def own_parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters(recurse=False)}


def unknown_layout(name: str) -> Layout:
    """The layout of a kernel or a quantization method that ckptkit does not know."""

    def compare() -> Iterator[Observation]:
        raise CannotCheck(f"{name} has a layout that ckptkit does not know")

    return lambda module: ((), compare)


def not_kept(names: Collection[str]) -> Layout:
    """Parameters that are read once and removed."""
    return lambda module: (names, lambda: iter(()))


def reordered(orders: Mapping[str, Callable[[Tensor], Tensor]]) -> Layout:
    """Parameters with reordered elements, and the functions that reorder each."""

    def expect(module: nn.Module) -> tuple[Collection[str], Compare]:
        own = own_parameters(module)
        before = {name: own[name].clone() for name in orders if name in own}

        def compare() -> Iterator[Observation]:
            for name, loaded in before.items():
                yield from unlike(module, name, [orders[name](loaded)])

        return before, compare

    return expect


def swapped_halves(tensor: Tensor) -> Tensor:
    """Gate and up of experts [experts, 2 x rows, ...] as up and gate."""
    return torch.cat(tensor.chunk(2, 1)[::-1], 1)


def unlike(module: nn.Module, name: str, wanted: Sequence[Tensor]) -> Iterator[Observation]:
    """The differences of a parameter from the first of `wanted`, by expert; none if it has the bits of any of them."""
    first = wanted[0]
    actual = getattr(module, name, None)
    if actual is None:
        yield Observation(name, name, "the parameter was removed")
    elif actual.dtype != first.dtype or actual.shape != first.shape:
        what = f"{list(actual.shape)} {actual.dtype} instead of {list(first.shape)} {first.dtype}"
        yield Observation(name, name, what)
    else:
        for place, (matrix, *candidates) in by_expert(name, actual.detach(), *wanted):
            differences = [difference(matrix, candidate) for candidate in candidates]
            if None not in differences:
                yield Observation(place, place, str(differences[0]))


def by_expert(name: str, *tensors: Tensor) -> Iterator[tuple[str, Sequence[Tensor]]]:
    """Tensors of a parameter, with its name; those of three axes expert by expert, as NAME[EXPERT]."""
    if tensors[0].dim() != 3:
        yield name, tensors
    else:
        for expert, matrices in enumerate(zip(*tensors, strict=True)):
            yield f"{name}[{expert}]", matrices


# Tolerance in steps of INT4. Kernels multiply codes and zero points by the scale in bfloat16, which rounds each product
# of up to 15 steps by a 512th, and their sum once more; a wrong code is at least one step away.
_INT4_TOLERANCE = 1 / 8
_FP8_TOLERANCE = 2**-7  # neighbours of a value in FP8 are a 16th or an 8th of it away; bfloat16 rounds by a 512th
_BATCH = 1024  # inputs
_LARGEST = 448.0  # of float8_e4m3fn
_SMALLEST = 1e-4  # DeepGEMM's lower bound of a block's largest value
_SCALE_TOLERANCE = 2**-20  # of a scale computed in float32


@dataclass(frozen=True)
class KernelValues:
    """A weight [outputs, inputs] in float32, and the tolerance of its kernel."""

    exact: Tensor
    within: Tensor  # of the same shape, or broadcast to it


def values_of(own: Mapping[str, Tensor], block: tuple[int, int] | None = None) -> KernelValues | None:
    """The values of loaded packed INT4, FP8 with a scale for each `block`, a plain weight, or None for another form."""
    if WEIGHT_PACKED in own:
        return _int4_values(own)
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
        return KernelValues(exact, exact.abs() * _FP8_TOLERANCE)
    return KernelValues(weight.float(), torch.zeros((), device=weight.device)) if weight.dtype.itemsize > 1 else None


def _int4_values(own: Mapping[str, Tensor]) -> KernelValues | None:
    words, scales = own[WEIGHT_PACKED], own[WEIGHT_SCALE].float()
    if words.dim() != 2:
        return None
    codes = unpack(words, (len(words), words.shape[1] * 8)).float()
    if WEIGHT_ZERO_POINT in own:
        zero_points = unpack_zero_point(own[WEIGHT_ZERO_POINT], tuple(scales.shape)).float()
        codes -= zero_points.repeat_interleave(codes.shape[1] // zero_points.shape[1], 1)
    steps = scales.repeat_interleave(codes.shape[1] // scales.shape[1], 1)
    return KernelValues(codes * steps, steps.abs() * _INT4_TOLERANCE)


def products(run: Callable[[Tensor], Tensor], dtype: torch.dtype, block: tuple[int, int] | None = None) -> Layout:
    """The weight of a Linear layer in a layout that only its kernel knows, compared by the kernel's results.

    `run` computes outputs [n, outputs] of inputs [n, inputs] in `dtype`, without a bias. Inputs are unit vectors.
    """

    def expect(module: nn.Module) -> tuple[Collection[str], Compare]:
        own = own_parameters(module)
        names = [name for name in own if name.startswith("weight")]
        weight, values = WEIGHT_PACKED if WEIGHT_PACKED in own else "weight", values_of(own, block)

        def compare() -> Iterator[Observation]:
            if values is None:
                raise CannotCheck("ckptkit does not know the layout of its kernel")
            outputs, inputs = values.exact.shape
            batches = torch.split(torch.arange(inputs, device=values.exact.device), _BATCH)
            units = (nn.functional.one_hot(batch, inputs).to(dtype) for batch in batches)
            columns = torch.cat([run(batch)[:, :outputs].float() for batch in units]).t()
            wrong = ~((columns - values.exact).abs() <= values.within)  # NaN too
            if fault := first_wrong(wrong, columns, values.exact, "elements differ from the kernel's result"):
                yield Observation(weight, weight, fault)

        return names, compare

    return expect


def absorbed(layer: nn.Module, heads: int, rows: int, block: tuple[int, int] | None = None) -> Layout:
    """The two matrices that latent attention computes from its `kv_b_proj`, [heads x (rows + values), latent].

    `W_UK_T` [heads, rows, latent] has the first `rows` of each head, `W_UV` [heads, latent, values] the remaining ones.
    """
    own = own_parameters(layer)
    packed = {name: tensor.clone() for name, tensor in own.items()} if WEIGHT_PACKED in own else None

    def expect(module: nn.Module) -> tuple[Collection[str], Compare]:
        def compare() -> Iterator[Observation]:
            # A plain weight does not change; FP8 may have been rounded again, which that layer's own layout compares.
            values = values_of(packed or own_parameters(layer), block)
            if values is None:
                raise CannotCheck("ckptkit does not know how kv_b_proj is changed")
            exact, within = (
                tensor.expand(values.exact.shape).reshape(heads, -1, values.exact.shape[1])
                for tensor in (values.exact, values.within)
            )
            faults = {
                "W_UK_T": _fault(module.W_UK_T, exact[:, :rows], within[:, :rows]),
                "W_UV": _fault(module.W_UV, exact[:, rows:].transpose(1, 2), within[:, rows:].transpose(1, 2)),
            }
            yield from (Observation(name, name, fault) for name, fault in faults.items() if fault)

        return ("W_UK_T", "W_UV"), compare

    return expect


def _fault(parameter: Any, expected: Tensor, within: Tensor) -> str | None:
    actual = parameter.detach().float()
    if actual.shape != expected.shape:
        return f"shape {list(actual.shape)} instead of {list(expected.shape)}"
    wrong = ~((actual - expected).abs() <= within)
    return first_wrong(wrong, actual, expected, "elements differ from kv_b_proj's")


def fp8_blocks(block: tuple[int, int], pairs: Sequence[tuple[str, str]]) -> Layout:
    """FP8 weights [..., rows, columns] with the loaded codes and scales, or rounded to other scales.

    `pairs`: the names of each weight and its scales [..., rows / block, columns / block].
    """

    def expect(module: nn.Module) -> tuple[Collection[str], Compare]:
        own = own_parameters(module)
        before = {pair: tuple(own[name].clone() for name in pair) for pair in pairs}

        def compare() -> Iterator[Observation]:
            unknown = ""
            for (name, scale_name), (codes, scales) in before.items():
                now = [getattr(module, one).detach() for one in (name, scale_name)]
                if [(one.shape, one.dtype) for one in now] != [(one.shape, one.dtype) for one in (codes, scales)]:
                    unknown = f"{scale_name} has a kernel's layout that ckptkit does not know"
                    continue
                for place, matrices in by_expert(name, codes, scales, *now):
                    loaded, repacked = matrices[:2], matrices[2:]
                    if fault := _wrong_codes(block, loaded, repacked):
                        yield Observation(place, place, fault)
                    elif change := _change(block, loaded, repacked):
                        yield Observation(name, name, "rounded to other scales", change=change)
            if unknown:
                raise CannotCheck(unknown)

        return [name for pair in pairs for name in pair], compare

    return expect


def _wrong_codes(block: tuple[int, int], before: Sequence[Tensor], after: Sequence[Tensor]) -> str | None:
    """Describes unfit scales of a matrix, and codes that are not the loaded values in their scales; or None."""
    codes, factors = codes_and_scales(before[0], before[1], block)
    loaded = codes * factors
    now, new = codes_and_scales(after[0], after[1], block)
    same = ~unequal(new.contiguous(), factors.contiguous())
    expected = torch.where(same, codes, (loaded / new).to(torch.float8_e4m3fn).float())
    fits = same | _fits(block, loaded, after[1], new)
    wrong = unequal(now, expected) & ~((now == 0) & (expected == 0)) | ~fits
    return first_wrong(wrong, now * new, loaded, "values differ")


def _fits(block: tuple[int, int], loaded: Tensor, scales: Tensor, new: Tensor) -> Tensor:
    """Where a new scale is a power of two that fits the largest value of its block, and is less than twice as large."""
    largest = _by_block(block, loaded.abs(), scales.shape).clamp(min=_SMALLEST) / _LARGEST
    needed = codes_and_scales(loaded, largest, block)[1]
    mantissa, _ = torch.frexp(new)
    return (mantissa == 0.5) & (new >= needed * (1 - _SCALE_TOLERANCE)) & (new <= 2 * needed * (1 + _SCALE_TOLERANCE))


def _by_block(block: tuple[int, int], values: Tensor, shape: torch.Size) -> Tensor:
    """The largest value of each block: [rows, columns] -> `shape`."""
    height, width = block
    padded = values.new_zeros(shape[0] * height, shape[1] * width)
    padded[: values.shape[0], : values.shape[1]] = values
    return padded.view(shape[0], height, shape[1], width).amax((1, 3))


def _change(block: tuple[int, int], before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """The largest change of a value, relative to the largest value of its block."""
    (codes, factors), (now, new) = (codes_and_scales(one[0], one[1], block) for one in (before, after))
    loaded = codes * factors
    largest = codes_and_scales(loaded, _by_block(block, loaded.abs(), before[1].shape), block)[1]
    return float(((now * new - loaded).abs() / largest.clamp(min=torch.finfo(torch.float32).tiny)).max())
