"""Explains which tensor's values stand under a name: the one answer for checks with a source, witnesses and `diff`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from ckptkit.core.specs import ranges, summarize
from verify.evidence.folding import parts_apart, pattern_of
from verify.evidence.moved.layers import Moved, moved_layers
from verify.evidence.moved.stages import Stages

AGAIN = "convert again from the source"


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
