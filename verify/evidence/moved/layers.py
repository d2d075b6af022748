"""Explains whole layers in the wrong place: many equal findings become one that says what happened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptkit.core.specs import ranges
from verify.evidence.folding import LAYER, layer_of
from verify.evidence.moved.stages import Stages


@dataclass(frozen=True)
class Moved:
    """One mistake that put values under other names."""

    text: str  # what happened, for people
    hint: str  # the next move
    names: list[str]  # tensors with wrong values
    is_layers: bool = False  # whether whole layers moved


# What most often puts layers into each other's place.
_EXCHANGED = "their names were exchanged where they were written: save or convert again from the source"
_ROTATED = "the layers were numbered from another start: save or convert again, numbered from 0"
_REORDERED = (
    "the layers were written in another order, for example sorted as text (0, 1, 10, 11, 2): save or convert again "
    "in order of number"
)
STAGE = "the layers of a pipeline stage were numbered from another one: save or convert again with global layer IDs"
_INSIDE = "the layers were numbered wrongly inside a pipeline stage: save or convert again with global layer IDs"
_COPIED = "save or convert again from the source"


def moved_layers(origins: Mapping[str, str | None], stages: Stages) -> Iterator[Moved]:
    """Yields the layers that hold another layer's values, those that one mistake explains together.

    `origins` maps each tensor with wrong values to the one whose values it holds; None where that is unknown. A layer
    has moved when it has several wrong tensors, and all of them hold the tensors of the same name in one other layer.
    """
    origin, wrong = _layer_origins(origins)
    exchanged = {layer for layer, other in origin.items() if origin.get(other) == layer}
    around = {layer for layer in _in_cycles(origin) if layer not in exchanged}
    texts = [
        *_exchanges({layer: origin[layer] for layer in exchanged}, stages),
        *_around({layer: origin[layer] for layer in around}, stages),
    ]
    texts += _shifts({layer: other for layer, other in origin.items() if layer not in exchanged | around}, stages)
    for layers, text, hint in texts:
        yield Moved(text, hint, [name for layer in sorted(layers) for name in wrong[layer]], is_layers=True)


def _layer_origins(origins: Mapping[str, str | None]) -> tuple[dict[int, int], dict[int, list[str]]]:
    """The layer whose values each moved layer holds; and the wrong tensors of every layer."""
    found: dict[int, set[int | None]] = defaultdict(set)
    wrong: dict[int, list[str]] = defaultdict(list)
    for name, other in origins.items():
        if (layer := layer_of(name)) is not None:
            wrong[layer].append(name)
            found[layer].add(_same_tensor_in(name, other))
    single = {layer: next(iter(others)) for layer, others in found.items() if len(others) == 1 < len(wrong[layer])}
    return {layer: other for layer, other in single.items() if other is not None}, wrong


def _in_cycles(origin: Mapping[int, int]) -> set[int]:
    """The layers on a cycle of layers that each hold the values of the next."""
    found = set()
    for start in origin:
        layer, steps = origin[start], 1
        while layer != start and layer in origin and steps <= len(origin):
            layer, steps = origin[layer], steps + 1
        found |= {start} if layer == start else set()
    return found


_Text = tuple[Iterable[int], str, str]


def _exchanges(pairs: Mapping[int, int], stages: Stages) -> Iterator[_Text]:
    """Pairs of layers in each other's place, those equally far apart together."""
    by_distance: dict[int, list[int]] = defaultdict(list)
    for layer, other in sorted(pairs.items()):
        if layer < other:
            by_distance[other - layer].append(layer)
    for distance, layers in by_distance.items():
        others = [layer + distance for layer in layers]
        blamed = stages.pair(layers, others)
        text = f"layers {ranges(layers)} and {ranges(others)} are exchanged"
        yield [*layers, *others], text + (f", which are {blamed}" if blamed else ""), STAGE if blamed else _EXCHANGED


def _around(origin: Mapping[int, int], stages: Stages) -> Iterator[_Text]:
    """Layers that are a permutation of themselves: rotated, or in another order."""
    layers = sorted(origin)
    if not layers:
        return
    first, count, by = layers[0], len(layers), origin[layers[0]] - layers[0]
    inside = stages.holding(layers)
    which = f"layers {ranges(layers)}{f', all of {inside},' if inside else ''}"
    if _contiguous(layers) and all(origin[layer] == first + (layer - first + by) % count for layer in layers):
        yield (
            layers,
            f"{which} are rotated: layer {first} holds the values of layer {first + by}",
            _INSIDE if inside else _REORDERED if first else _ROTATED,
        )
    else:
        held = ", ".join(f"layer {layer} those of layer {origin[layer]}" for layer in layers[1:3]) + (
            " and so on" if layers[3:] else ""
        )
        yield (
            layers,
            f"{which} stand in another order: layer {first} holds the values of layer {origin[first]}, {held}",
            _INSIDE if inside else _REORDERED,
        )


def _shifts(origin: Mapping[int, int], stages: Stages) -> Iterator[_Text]:
    """Layers that hold copies of others; those that moved equally far together."""
    by_distance: dict[int, list[int]] = defaultdict(list)
    for layer, other in sorted(origin.items()):
        by_distance[other - layer].append(layer)
    for distance, layers in by_distance.items():
        others = [layer + distance for layer in layers]
        text = (
            f"layer {layers[0]} holds the values of layer {others[0]}"
            if len(layers) == 1
            else f"layers {ranges(layers)} hold the values of layers {ranges(others)}"
        )
        if blamed := stages.pair(layers, others):
            yield layers, f"{text}, which are {blamed}", STAGE
        elif len(layers) > 1 and (inside := stages.holding({*layers, *others})):
            yield layers, f"{text}, all of {inside}", _INSIDE
        else:
            yield layers, text, _COPIED


def _contiguous(layers: Sequence[int]) -> bool:
    return layers[-1] - layers[0] + 1 == len(layers)


def _same_tensor_in(name: str, other: str | None) -> int | None:
    """The layer of `other` when it is the tensor `name` of another layer."""
    here, there = LAYER.match(name), LAYER.match(other or "")
    if not here or not there or other is None or name[here.end() :] != other[there.end() :]:
        return None
    return int(there[1])
