"""Whole layers in the wrong place, told from single tensors: many equal findings become one that says what happened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptkit.core.specs import ranges
from verify.evidence.folding import LAYER


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
_COPIED = "save or convert again from the source"


def moved_layers(whose: Mapping[str, str | None]) -> Iterator[Moved]:
    """Layers that hold another layer's values, those that one mistake explains together.

    `whose` maps each tensor with wrong values to the one whose values it holds, or None. A layer has moved when all its
    wrong tensors, and more than one, hold the tensors of the same name in one other layer.
    """
    origin, wrong = _origins(whose)
    exchanged = {layer for layer, other in origin.items() if origin.get(other) == layer}
    around = {layer for layer in _in_cycles(origin) if layer not in exchanged}
    texts = [
        *_exchanges({layer: origin[layer] for layer in exchanged}),
        *_around({layer: origin[layer] for layer in around}),
    ]
    texts += _shifts({layer: other for layer, other in origin.items() if layer not in exchanged | around})
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


def _exchanges(pairs: Mapping[int, int]) -> Iterator[_Text]:
    """Pairs of layers in each other's place, those equally far apart together. Two runs are two pipeline stages."""
    by_distance: dict[int, list[int]] = defaultdict(list)
    for layer, other in sorted(pairs.items()):
        if layer < other:
            by_distance[other - layer].append(layer)
    for distance, layers in by_distance.items():
        others = [layer + distance for layer in layers]
        hint = _STAGE if len(layers) > 1 and _contiguous(layers) else _EXCHANGED
        yield [*layers, *others], f"layers {ranges(layers)} and {ranges(others)} are exchanged", hint


def _around(origin: Mapping[int, int]) -> Iterator[_Text]:
    """Layers that all stand somewhere among themselves: turned round by some places, or in another order."""
    layers = sorted(origin)
    if not layers:
        return
    first, count, by = layers[0], len(layers), origin[layers[0]] - layers[0]
    which = f"layers {ranges(layers)}"
    if _contiguous(layers) and all(origin[layer] == first + (layer - first + by) % count for layer in layers):
        yield (
            layers,
            f"{which} are rotated: layer {first} holds the values of layer {first + by}",
            _REORDERED if first else _ROTATED,
        )
    else:
        held = ", ".join(f"layer {layer} those of layer {origin[layer]}" for layer in layers[1:3]) + (
            " and so on" if layers[3:] else ""
        )
        yield (
            layers,
            f"{which} stand in another order: layer {first} holds the values of layer {origin[first]}, {held}",
            _REORDERED,
        )


def _shifts(origin: Mapping[int, int]) -> Iterator[_Text]:
    """Layers that hold the values of others which stand elsewhere too; those that moved equally far together."""
    by_distance: dict[int, list[int]] = defaultdict(list)
    for layer, other in sorted(origin.items()):
        by_distance[other - layer].append(layer)
    for distance, layers in by_distance.items():
        text = ranges(layer + distance for layer in layers)
        one = f"layer {layers[0]} holds the values of layer {text}"
        hint = _STAGE if len(layers) > 1 and _contiguous(layers) else _COPIED
        yield layers, one if len(layers) == 1 else f"layers {ranges(layers)} hold the values of layers {text}", hint


def _contiguous(layers: Sequence[int]) -> bool:
    return layers[-1] - layers[0] + 1 == len(layers)


def _same_tensor_in(name: str, other: str | None) -> int | None:
    """The layer of `other` when it is the tensor `name` of another layer."""
    here, there = LAYER.match(name), LAYER.match(other or "")
    if not here or not there or other is None or name[here.end() :] != other[there.end() :]:
        return None
    return int(there[1])


def repeated_layers(equal: Iterable[Sequence[str]]) -> Iterator[tuple[str, list[str]]]:
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
        sets = [ranges(start + gap for start in starts[gaps]) for gap in gaps]
        yield f"layers {' and '.join(sets)} hold the same bytes", found
