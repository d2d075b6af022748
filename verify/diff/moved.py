"""Finds tensors whose bits stand under another name on the other side, and says in few words what was moved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptkit.core.specs import summarize
from verify.diff.pairs import Content, Pair
from verify.evidence.moved.layers import moved_layers
from verify.evidence.moved.parts import moved_within
from verify.evidence.moved.stages import Stages


@dataclass(frozen=True)
class Move:
    """What was moved, in words; the names in A, and for each the name in B that has its bits."""

    text: str
    names: tuple[str, ...]
    others: tuple[str, ...]


def whose_bits(pairs: Sequence[Pair]) -> dict[str, str]:
    """For each tensor of A that was moved the name in B that has its bits.

    A tensor that differs from its namesake may have the bits of any other name of B. One whose name B lacks counts as
    renamed where its bits stand under a name that A lacks. Constant tensors never count.
    """
    homes: dict[Content, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.content_b is not None:
            homes[pair.content_b].append(pair)
    moved: dict[str, str] = {}
    taken: set[str] = set()
    for pair in pairs:
        if pair.state not in ("differing", "only_a") or pair.constant or pair.content_a is None:
            continue
        found = [home for home in homes.get(pair.content_a, ()) if home.name != pair.name]
        if pair.state == "only_a":
            found = [home for home in found if home.state == "only_b" and home.name not in taken]
        if found:
            best = min(found, key=lambda home: _unlikely(pair, home))
            moved[pair.name] = best.name
            taken.add(best.name)
    return moved


def _unlikely(pair: Pair, home: Pair) -> tuple[bool, bool, int]:
    """Orders the names that have a tensor's bits: first the one in whose place it is, then those of its kind."""
    mutual = home.content_a is not None and home.content_a == pair.content_b
    one, other = pair.name.split("."), home.name.split(".")
    apart = sum(left != right for left, right in zip(one, other, strict=False)) + abs(len(one) - len(other))
    return not mutual, home.state == "equal", apart


def moves_of(pairs: Sequence[Pair], whose: Mapping[str, str]) -> Iterator[Move]:
    """Yields what `whose_bits` found, those that one mistake explains together: layers, experts, projections, names."""
    differing = [pair.name for pair in pairs if pair.state == "differing"]
    left = dict(whose)
    stages = Stages.of_names([pair.name for pair in pairs])
    for layer in moved_layers({name: whose.get(name) for name in differing}, stages):
        yield _move(layer.text, layer.names, whose)
        for name in layer.names:
            del left[name]
    placed = set(differing)
    yield from _within({name: other for name, other in left.items() if name in placed})
    for names in _alike({name: other for name, other in left.items() if name not in placed}):
        yield _move(f"another name in B: {summarize(whose[name] for name in names)}", names, whose)


def _move(text: str, names: Sequence[str], whose: Mapping[str, str]) -> Move:
    return Move(text, tuple(names), tuple(whose[name] for name in names))


def _within(whose: Mapping[str, str]) -> Iterator[Move]:
    """Yields moves between names that differ in one place (an expert, a projection), and then all others."""
    found, others = moved_within(whose)
    for text, names in found:
        yield _move(text, names, whose)
    for names in _alike(others):
        yield _move(f"the values of {summarize(others[name] for name in names)} in B", names, whose)


def _alike(whose: Mapping[str, str]) -> Iterable[list[str]]:
    """Names that differ in numbers only, on both sides."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, other in whose.items():
        groups[_pattern(name), _pattern(other)].append(name)
    return groups.values()


def _pattern(name: str) -> str:
    return ".".join("#" if part.isdecimal() else part for part in name.split("."))
