"""Whole layers in the wrong place, told from single tensors: many equal findings become one that says what happened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptkit.core.specs import ranges
from verify.evidence.folding import LAYER
from verify.evidence.moved.stages import Stages


def layers_of(names: Iterable[str]) -> list[int]:
    """The numbers of the layers that these tensors belong to, each once, in order."""
    return sorted({int(match[1]) for name in names if (match := LAYER.match(name))})


@dataclass(frozen=True)
class Moved:
    """Layers that hold other layers' values: what to say of them, the next move, and the tensors concerned."""

    text: str
    hint: str
    names: list[str]


# What most often puts layers into each other's place.
_EXCHANGED = "their names were exchanged where they were written: save or convert again from the source"
_ROTATED = "the layers were numbered from another start: save or convert again, numbered from 0"
_REORDERED = (
    "the layers were written in another order, for example sorted as text (0, 1, 10, 11, 2): save or convert again "
    "in order of number"
)
_STAGE = "the layers of a pipeline stage were numbered from another one: save or convert again with global layer IDs"
_INSIDE = "the layers were numbered wrongly inside a pipeline stage: save or convert again with global layer IDs"
_COPIED = "save or convert again from the source"
_REPEATED = "compare with the release: which layer belongs there?"


def moved_layers(whose: Mapping[str, str | None], stages: Stages) -> Iterator[Moved]:
    """Layers that hold another layer's values, those that one mistake explains together.

    `whose` maps each tensor with wrong values to the one whose values it holds, or None. A layer has moved when all its
    wrong tensors, and more than one, hold the tensors of the same name in one other layer. Only layers that `stages`
    has as a pipeline stage's are blamed on one.
    """
    origin, wrong = _origins(whose)
    exchanged = {layer for layer, other in origin.items() if origin.get(other) == layer}
    around = {layer for layer in _in_cycles(origin) if layer not in exchanged}
    texts = [
        *_exchanges({layer: origin[layer] for layer in exchanged}, stages),
        *_around({layer: origin[layer] for layer in around}, stages),
    ]
    texts += _shifts({layer: other for layer, other in origin.items() if layer not in exchanged | around}, stages)
    for layers, text, hint in texts:
        yield Moved(text, hint, [name for layer in sorted(layers) for name in wrong[layer]])


def _origins(whose: Mapping[str, str | None]) -> tuple[dict[int, int], dict[int, list[str]]]:
    """For each layer that moved, the one whose values it holds; and the wrong tensors of every layer."""
    origins: dict[int, set[int | None]] = defaultdict(set)
    wrong: dict[int, list[str]] = defaultdict(list)
    for name, other in whose.items():
        if match := LAYER.match(name):
            layer = int(match[1])
            wrong[layer].append(name)
            origins[layer].add(_same_tensor_in(name, other))
    single = {layer: next(iter(found)) for layer, found in origins.items() if len(found) == 1 and len(wrong[layer]) > 1}
    return {layer: other for layer, other in single.items() if other is not None}, wrong


def _in_cycles(origin: Mapping[int, int]) -> set[int]:
    """The layers that are come back to, going from layer to layer by whose values they hold."""
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
        yield [*layers, *others], text + (f", which are {blamed}" if blamed else ""), _STAGE if blamed else _EXCHANGED


def _around(origin: Mapping[int, int], stages: Stages) -> Iterator[_Text]:
    """Layers that all stand somewhere among themselves: turned round by some places, or in another order."""
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
    """Layers that hold the values of others which stand elsewhere too; those that moved equally far together."""
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
            yield layers, f"{text}, which are {blamed}", _STAGE
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


def repeated_layers(equal: Iterable[Sequence[str]], stages: Stages) -> Iterator[Moved]:
    """Tensors with the same bytes that differ only in their layer: what to say of those equally far apart, with them.

    `equal` are groups of tensors of one kind with the same bytes; groups with two tensors of one layer are left out.
    """
    by_gaps: dict[tuple[int, ...], list[str]] = defaultdict(list)
    starts: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for names in equal:
        layers = layers_of(names)
        if len(layers) < len(names):
            continue
        gaps = tuple(layer - layers[0] for layer in layers)
        by_gaps[gaps] += names
        starts[gaps].add(layers[0])
    for gaps, found in by_gaps.items():
        sets = [sorted(start + gap for start in starts[gaps]) for gap in gaps]
        text = f"layers {' and '.join(map(ranges, sets))} hold the same bytes"
        blamed = len(sets) == 2 and stages.pair(*sets)
        yield Moved(f"{text}; they are {blamed}" if blamed else text, _STAGE if blamed else _REPEATED, found)
