"""Explains tensors that hold the same bytes: layers, and experts of one layer."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ckptkit.core.specs import ranges
from verify.evidence.folding import layers_of
from verify.evidence.moved.layers import STAGE, Moved
from verify.evidence.moved.stages import Stages

_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(.+)")
_LOCAL = "each expert parallel rank may have numbered its experts from 0: save or convert again with global expert IDs"
_WHICH = "compare with the release: which expert belongs there?"
_REPEATED = "compare with the release: which layer belongs there?"


def repeated_layers(equal: Iterable[Sequence[str]], stages: Stages) -> Iterator[Moved]:
    """Explains tensors with the same bytes that differ only in their layer, those equally far apart together.

    `equal` are groups of tensors of one pattern with the same bytes. Groups with two tensors of one layer are left out.
    """
    single = ((layers_of(names), names) for names in equal)
    for sets, names in _equally_far_apart((layers, names) for layers, names in single if len(layers) == len(names)):
        text = f"layers {' and '.join(map(ranges, sets))} hold the same bytes"
        blamed = len(sets) == 2 and stages.pair(*sets)
        yield Moved(f"{text}; they are {blamed}" if blamed else text, STAGE if blamed else _REPEATED, names)


def repeated_experts(equal: Iterable[Sequence[str]]) -> Iterator[Moved]:
    """Explains tensors with the same bytes within a layer, experts equally far apart together.

    `equal` is as in `repeated_layers`. Groups that differ in more than the expert stand alone.
    """
    experts: list[tuple[list[int], Sequence[str]]] = []
    for names in equal:
        matches = [match for name in names if (match := _EXPERT.fullmatch(name))]
        if len(matches) < len(names) or len({(match[1], match[3]) for match in matches}) > 1:
            yield Moved("the same bytes", _WHICH, list(names))
        else:
            experts.append((sorted(int(match[2]) for match in matches), names))
    for sets, found in _equally_far_apart(experts):
        text = f"experts {' and '.join(map(ranges, sets))} hold the same bytes"
        yield Moved(text, _LOCAL if _numbered_by_rank(sets) else _WHICH, found)


def _equally_far_apart(
    groups: Iterable[tuple[Sequence[int], Sequence[str]]],
) -> Iterator[tuple[list[list[int]], list[str]]]:
    """Joins groups of sorted numbers with the same gaps: all first numbers, all second ones, and so on; their names."""
    names_of: dict[tuple[int, ...], list[str]] = defaultdict(list)
    starts: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for numbers, names in groups:
        gaps = tuple(number - numbers[0] for number in numbers)
        names_of[gaps] += names
        starts[gaps].add(numbers[0])
    for gaps, found in names_of.items():
        yield [sorted(start + gap for start in starts[gaps]) for gap in gaps], found


def _numbered_by_rank(sets: Sequence[Sequence[int]]) -> bool:
    """Whether these are the first experts of several ranks with as many each: runs of one length, the first from 0."""
    size = len(sets[0])
    runs = (list(some) == list(range(some[0], some[0] + size)) and some[0] % size == 0 for some in sets)
    return size > 1 and sets[0][0] == 0 and all(runs)
