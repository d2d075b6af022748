"""Whole layers in the wrong place, told from single tensors: many equal findings become one that says what happened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckptkit.specs import ranges
from verify.folding import LAYER


def layers_of(names: Iterable[str]) -> list[int]:
    """The numbers of the layers that these tensors belong to, each once, in order."""
    return sorted({int(match[1]) for name in names if (match := LAYER.match(name))})


def moved_layers(whose: Mapping[str, str | None]) -> Iterator[tuple[str, list[str]]]:
    """Layers that hold another layer's values: what to say of all that moved equally far, and the tensors concerned.

    `whose` maps each tensor with wrong values to the one whose values it holds, or None. A layer has moved when all its
    wrong tensors, and more than one, hold the tensors of the same name in one other layer.
    """
    origins: dict[int, set[int | None]] = defaultdict(set)
    wrong: dict[int, list[str]] = defaultdict(list)
    for name, other in whose.items():
        if match := LAYER.match(name):
            layer = int(match[1])
            wrong[layer].append(name)
            origins[layer].add(_same_tensor_in(name, other))
    by_distance: dict[int, list[int]] = defaultdict(list)
    for layer, origin in origins.items():
        (first, *rest) = origin
        if first is not None and not rest and len(wrong[layer]) > 1:
            by_distance[first - layer].append(layer)
    for distance, layers in by_distance.items():
        origin_text = ranges(layer + distance for layer in layers)
        one = f"layer {layers[0]} holds the values of layer {origin_text}"
        text = one if len(layers) == 1 else f"layers {ranges(layers)} hold the values of layers {origin_text}"
        yield text, [name for layer in sorted(layers) for name in wrong[layer]]


def _same_tensor_in(name: str, other: str | None) -> int | None:
    """The layer of `other` when it is the tensor `name` of another layer."""
    here, there = LAYER.match(name), LAYER.match(other or "")
    if not here or not there or other is None or name[here.end() :] != other[there.end() :]:
        return None
    return int(there[1])


def repeated_layers(equal: Iterable[Sequence[str]]) -> Iterator[tuple[str, list[str]]]:
    """Tensors with the same bytes that differ only in their layer: what to say of all layers equally far apart, and the tensors.

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
