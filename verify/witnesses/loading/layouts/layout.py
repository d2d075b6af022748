"""The protocol of a layout, and those that reorder, remove or hide parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn

from ckptkit.verify.witnesses.loading.bits import difference


@dataclass
class LayerOutcome:
    """The comparison of a layer after repacking."""

    differences: dict[str, str] = field(default_factory=dict)  # by parameter; NAME[2] is expert 2 of all experts
    requantized: dict[str, float] = field(default_factory=dict)  # the largest change of parameters in new scales, of 1
    unknown: str | None = None  # the reason why something cannot be compared


Compare = Callable[[], LayerOutcome]
# Copies a layer's parameters before repacking. Returns the names of those that it covers (none if unknown), and the
# function that compares them afterwards.
Layout = Callable[[nn.Module], tuple[Collection[str], Compare]]


def own_parameters(module: nn.Module) -> dict[str, Tensor]:
    """A layer's own parameters, by their names in it."""
    return {name: parameter.detach() for name, parameter in module.named_parameters(recurse=False)}


def unknown_layout(name: str) -> Layout:
    """The layout of a kernel or a quantization method that ckptkit does not know."""
    return lambda module: ((), lambda: LayerOutcome(unknown=f"{name} has a layout of its own"))


def not_kept(names: Collection[str]) -> Layout:
    """Parameters that are read once and removed."""
    return lambda module: (names, LayerOutcome)


def reordered(orders: Mapping[str, Callable[[Tensor], Tensor]]) -> Layout:
    """Parameters with reordered elements, and the functions that reorder each."""

    def expect(module: nn.Module) -> tuple[Collection[str], Compare]:
        own = own_parameters(module)
        before = {name: own[name].clone() for name in orders if name in own}

        def compare() -> LayerOutcome:
            faults = (unlike(module, name, [orders[name](loaded)]) for name, loaded in before.items())
            return LayerOutcome(dict(chain.from_iterable(faults)))

        return before, compare

    return expect


def swapped_halves(tensor: Tensor) -> Tensor:
    """Gate and up of experts [experts, 2 x rows, ...] as up and gate."""
    return torch.cat(tensor.chunk(2, 1)[::-1], 1)


def unlike(module: nn.Module, name: str, wanted: Sequence[Tensor]) -> Iterator[tuple[str, str]]:
    """The differences of a parameter from the first of `wanted`, or none if it equals one of them bit for bit.

    A parameter of three axes is compared expert by expert.
    """
    first = wanted[0]
    actual = getattr(module, name, None)
    if actual is None:
        yield name, "the parameter was removed"
    elif actual.dtype != first.dtype or actual.shape != first.shape:
        yield name, f"{list(actual.shape)} {actual.dtype} instead of {list(first.shape)} {first.dtype}"
    else:
        for place, (matrix, *candidates) in by_expert(name, actual.detach(), *wanted):
            differences = [difference(matrix, candidate) for candidate in candidates]
            if None not in differences:
                yield place, str(differences[0])


def by_expert(name: str, *tensors: Tensor) -> Iterator[tuple[str, Sequence[Tensor]]]:
    """Tensors of a parameter, with its name; those of three axes expert by expert, as NAME[EXPERT]."""
    if tensors[0].dim() != 3:
        yield name, tensors
    else:
        for expert, matrices in enumerate(zip(*tensors, strict=True)):
            yield f"{name}[{expert}]", matrices
