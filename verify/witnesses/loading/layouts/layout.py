"""The protocol of a layout, and two layouts: another order of the same elements, and one that is not known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from verify.witnesses.loading.bits import difference


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
        actual = found.detach()
        for expert in range(len(actual)) if actual.dim() == 3 else [None]:
            differences = [difference(_of(actual, expert), _of(one, expert)) for one in candidates]
            if None not in differences:
                yield of_expert(name, expert), str(differences[0])


def of_expert(name: str, expert: int | None) -> str:
    """The place of an expert in a parameter for all of them; None: of the parameter."""
    return name if expert is None else f"{name}[{expert}]"


def _of(tensor: Tensor, expert: int | None) -> Tensor:
    return tensor if expert is None else tensor[expert]
