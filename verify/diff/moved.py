"""Finds tensors whose bits stand under another name on the other side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptkit.core.specs import summarize
from verify.diff.pairs import Content, Pair
from verify.evidence.folding import parts_apart
from verify.evidence.moved import Stages, explain_moves, group_pairs


@dataclass(frozen=True)
class Move:
    """Tensors that one mistake moved."""

    text: str  # what was moved, for people
    names: tuple[str, ...]  # in A
    others: tuple[str, ...]  # for each the name in B that has its bits


def moved_names(pairs: Sequence[Pair]) -> dict[str, str]:
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
    return not mutual, home.state == "equal", parts_apart(pair.name, home.name)


def moves_of(pairs: Sequence[Pair], whose: Mapping[str, str]) -> Iterator[Move]:
    """Yields what `moved_names` found, what one mistake explains together; then tensors renamed in B."""
    differing = [pair.name for pair in pairs if pair.state == "differing"]
    stages = Stages.of_names([pair.name for pair in pairs])
    for move in explain_moves({name: whose.get(name) for name in differing}, stages, " in B"):
        yield _move(move.text, move.names, whose)
    placed = set(differing)
    for names in group_pairs({name: other for name, other in whose.items() if name not in placed}):
        yield _move(f"another name in B: {summarize(whose[name] for name in names)}", names, whose)


def _move(text: str, names: Sequence[str], whose: Mapping[str, str]) -> Move:
    return Move(text, tuple(names), tuple(whose[name] for name in names))
