"""The protocol of a layout, and two layouts: another order of the same elements, and one that is not known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ckptkit.verify.witnesses.loading.bits import difference


@dataclass
class LayerOutcome:
    """What was found of a layer after repacking."""

    # What is wrong in a parameter, by its name in the layer; NAME[2] is expert 2 of a parameter for all experts.
    differences: dict[str, str] = field(default_factory=dict)
    requantized: dict[str, float] = field(default_factory=dict)  # parameters in new scales: the largest change, of 1
    unknown: str | None = None  # what of it cannot be compared, and why


Compare = Callable[[], LayerOutcome]
# Notes down what a layer holds before repacking: the names of the parameters that are compared, and what compares them
# afterwards. One that is not known names none.
Layout = Callable[[nn.Module], tuple[Collection[str], Compare]]


def own_parameters(module: nn.Module) -> dict[str, Tensor]:
    """A layer's own parameters, by their names in it."""
    return {name: parameter.detach() for name, parameter in module.named_parameters(recurse=False)}


def unknown_layout(name: str) -> Layout:
    """The layout of a kernel or a quantization method that is not known here."""
    return lambda module: ((), lambda: LayerOutcome(unknown=f"{name} has a layout of its own"))


def not_kept(names: Collection[str]) -> Layout:
    """Parameters that are read once and taken away."""
    return lambda module: (names, LayerOutcome)


def reordered(orders: Mapping[str, Callable[[Tensor], Tensor]]) -> Layout:
    """Parameters whose elements stand in another order: for each, what makes it of the loaded one."""

    def expect(module: nn.Module) -> tuple[Collection[str], Compare]:
        own = own_parameters(module)
        before = {name: own[name].clone() for name in orders if name in own}

        def compare() -> LayerOutcome:
            wanted = ((name, orders[name](loaded)) for name, loaded in before.items())
            return LayerOutcome(dict(one for name, tensor in wanted for one in unlike(module, name, [tensor])))

        return before, compare

    return expect


def swapped_halves(tensor: Tensor) -> Tensor:
    """Gate and up of experts [experts, 2 x rows, ...] as up and gate."""
    return torch.cat(tensor.chunk(2, 1)[::-1], 1)


def unlike(module: nn.Module, name: str, wanted: Iterable[Tensor]) -> Iterator[tuple[str, str]]:
    """Where and how a parameter differs from the first of `wanted`, unless it equals one of them bit for bit.

    One of three axes is compared expert by expert.
    """
    candidates = list(wanted)
    first = candidates[0]
    found = getattr(module, name, None)
    if found is None:
        yield name, "it is not there any more"
    elif found.dtype != first.dtype or found.shape != first.shape:
        yield name, f"{list(found.shape)} {found.dtype} instead of {list(first.shape)} {first.dtype}"
    else:
        for place, (actual, *expected) in by_expert(name, found.detach(), *candidates):
            differences = [difference(actual, matrix) for matrix in expected]
            if None not in differences:
                yield place, str(differences[0])


def by_expert(name: str, *tensors: Tensor) -> Iterator[tuple[str, Sequence[Tensor]]]:
    """Tensors of a parameter, with its name; those of three axes expert by expert, with NAME[EXPERT]."""
    if tensors[0].dim() != 3:
        yield name, tensors
    else:
        for expert, matrices in enumerate(zip(*tensors, strict=True)):
            yield f"{name}[{expert}]", matrices
