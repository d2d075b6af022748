"""The protocol of a layout, and two layouts: another order of the same elements, and one that is not known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from verify.witnesses.loading.bits import difference


@dataclass(frozen=True)
class ParamDifference:
    """A parameter that does not hold what it must."""

    param: str  # by its name in the layer
    what: str
    expert: int | None = None  # of one parameter for all experts


@dataclass
class LayerOutcome:
    """What was found of a layer after repacking."""

    differences: list[ParamDifference] = field(default_factory=list)
    requantized: dict[str, float] = field(default_factory=dict)  # parameters in new scales: the largest change, of 1
    unknown: str | None = None  # what of it cannot be compared, and why


@dataclass(frozen=True)
class LayerExpected:
    """What a layer must hold after repacking, noted down before it."""

    params: frozenset[str]  # the parameters that are compared, by their names in the layer
    compare: Callable[[], LayerOutcome]  # afterwards
    free: bool = False  # instead, any parameter of the layer may change in ways that are not known


Layout = Callable[[nn.Module], LayerExpected]


def own_parameters(module: nn.Module) -> dict[str, Tensor]:
    """A layer's own parameters, by their names in it."""
    return {name: parameter.detach() for name, parameter in module.named_parameters(recurse=False)}


def unknown_layout(name: str) -> Layout:
    """The layout of a kernel or a quantization method that is not known here."""

    def expect(module: nn.Module) -> LayerExpected:
        outcome = LayerOutcome(unknown=f"{name} has a layout of its own")
        return LayerExpected(frozenset(), lambda: outcome, free=True)

    return expect


def not_kept(names: Iterable[str]) -> Layout:
    """Parameters that are read once and taken away."""
    return lambda module: LayerExpected(frozenset(names), LayerOutcome)


def reordered(orders: Mapping[str, Callable[[Tensor], Tensor]]) -> Layout:
    """Parameters whose elements stand in another order: for each, what makes it of the loaded one."""

    def expect(module: nn.Module) -> LayerExpected:
        own = own_parameters(module)
        before = {name: own[name].clone() for name in orders if name in own}

        def compare() -> LayerOutcome:
            wanted = ((name, orders[name](loaded)) for name, loaded in before.items())
            return LayerOutcome([one for name, tensor in wanted for one in unlike(module, name, [tensor])])

        return LayerExpected(frozenset(before), compare)

    return expect


def swapped_halves(tensor: Tensor) -> Tensor:
    """Gate and up of experts [experts, 2 x rows, ...] as up and gate."""
    return torch.cat(tensor.chunk(2, 1)[::-1], 1)


def unlike(module: nn.Module, name: str, wanted: Iterable[Tensor]) -> Iterator[ParamDifference]:
    """How a parameter differs from the first of `wanted`, unless it equals one of them bit for bit.

    One of three axes is compared expert by expert.
    """
    candidates = list(wanted)
    first = candidates[0]
    found = getattr(module, name, None)
    if found is None:
        yield ParamDifference(name, "it is not there any more")
    elif found.dtype != first.dtype or found.shape != first.shape:
        yield ParamDifference(name, f"{list(found.shape)} {found.dtype} instead of {list(first.shape)} {first.dtype}")
    else:
        actual = found.detach()
        for expert in range(len(actual)) if actual.dim() == 3 else [None]:
            differences = [difference(_of(actual, expert), _of(one, expert)) for one in candidates]
            if None not in differences:
                yield ParamDifference(name, str(differences[0]), expert)


def _of(tensor: Tensor, expert: int | None) -> Tensor:
    return tensor if expert is None else tensor[expert]
