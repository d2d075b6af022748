"""Explains which tensor's values stand under a name: the one answer for checks with a source, witnesses and `diff`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from ckptkit.core.specs import summarize
from verify.evidence.folding import parts_apart, pattern_of
from verify.evidence.moved.layers import Moved, moved_layers
from verify.evidence.moved.parts import moved_within
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
