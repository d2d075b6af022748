"""Explains which tensor's values stand under a name: the one answer for checks with a source, witnesses and `diff`.

Without a source it explains layers and experts that hold the same bytes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckptkit.core.specs import ranges, summarize
from verify.evidence.folding import layers_of, parts_apart, pattern_of
from verify.evidence.moved.layers import STAGE, Moved, moved_layers
from verify.evidence.moved.stages import Stages

AGAIN = "convert again from the source"
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(.+)")
_LOCAL = "each expert parallel rank may have numbered its experts from 0: save or convert again with global expert IDs"
_WHICH = "compare with the release: which expert belongs there?"
_REPEATED = "compare with the release: which layer belongs there?"


def explain_moves(origins: Mapping[str, str | None], stages: Stages, where: str = "") -> Iterator[Moved]:
    """Yields the tensors that hold others' values, those that one mistake explains together.

    Whole layers come first, then experts and projections, then what remains. `origins` is as in `moved_layers`, and
    `where` follows the name of a tensor whose values stand elsewhere.
    """
    left = {name: other for name, other in origins.items() if other is not None}
    for layers in moved_layers(origins, stages):
        yield layers
        for name in layers.names:
            del left[name]
    found, others = moved_within(left)
    for text, names in found:
        yield Moved(text, AGAIN, names)
    for names in group_pairs(others):
        yield Moved(f"the values of {summarize(others[name] for name in names)}{where}", AGAIN, names)


def group_pairs(pairs: Mapping[str, str]) -> Iterable[list[str]]:
    """Groups names that differ in numbers only, on both sides of the pair."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, other in pairs.items():
        groups[pattern_of(name), pattern_of(other)].append(name)
    return groups.values()


def siblings_of(name: str, names: Iterable[str]) -> tuple[list[str], list[str]]:
    """The other tensors of the same pattern: those that differ in one number, and those that differ in more."""
    pattern = pattern_of(name)
    near, far = list[str](), list[str]()
    for other in names:
        if other != name and pattern_of(other) == pattern:
            (near if parts_apart(name, other) == 1 else far).append(other)
    return near, far


_NUMBERED = ("experts", "layers")


def moved_within(origins: Mapping[str, str]) -> tuple[list[tuple[str, list[str]]], dict[str, str]]:
    """The moves between names that differ in one part (an expert, a projection): a text each, and the names concerned.

    `origins` maps each tensor to the one whose values it holds. The second result is what is left of it.
    """
    moves: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)  # by what stands before and behind the part
    others: dict[str, str] = {}
    for name, other in origins.items():
        if parts_apart(name, other) != 1 or name.count(".") != other.count("."):
            others[name] = other
            continue
        one, two = name.split("."), other.split(".")
        at = next(index for index, part in enumerate(one) if part != two[index])
        moves[".".join(one[:at]), ".".join(one[at + 1 :])][one[at]] = two[at]
    same: dict[tuple[str, frozenset[tuple[str, str]]], list[str]] = defaultdict(list)
    for (before, behind), mapping in moves.items():
        kind = before.rpartition(".")[2]
        key = kind if kind in _NUMBERED else "", frozenset(mapping.items())
        same[key] += [".".join(filter(None, (before, part, behind))) for part in mapping]
    return [(_relation(kind, dict(relation)), names) for (kind, relation), names in same.items()], others


def _relation(kind: str, mapping: Mapping[str, str]) -> str:
    """Words for parts of names that hold each other's values: `experts 3 and 5 are exchanged`."""
    prefix = f"{kind} " if kind else ""
    if all(mapping.get(other) == name for name, other in mapping.items()):
        first = [name for name in sorted(mapping, key=_order) if _order(name) < _order(mapping[name])]
        return f"{prefix}{_listed(first)} and {_listed([mapping[name] for name in first])} are exchanged"
    names = sorted(mapping, key=_order)
    if set(mapping) == set(mapping.values()):
        held = ", ".join(f"{name} holds the values of {mapping[name]}" for name in names[:3])
        return f"{prefix}{_listed(names)} stand in another order: {held}{' and so on' if names[3:] else ''}"
    if len(names) == 1:
        return f"{kind[:-1]}{' ' if kind else ''}{names[0]} holds the values of {mapping[names[0]]}"
    return f"{prefix}{_listed(names)} hold the values of {_listed([mapping[name] for name in names])}"


def _order(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdecimal() else (-1, part)


def _listed(parts: Iterable[str]) -> str:
    parts = list(parts)
    return ranges(map(int, parts)) if all(part.isdecimal() for part in parts) else ", ".join(parts)


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
