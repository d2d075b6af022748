"""Experts of one layer that hold the same bytes, those that one mistake explains together."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ckptkit.core.specs import ranges
from verify.evidence.moved.layers import Moved

_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(.+)")
_LOCAL = "each expert parallel rank may have numbered its experts from 0: save or convert again with global expert IDs"
_WHICH = "compare with the release: which expert belongs there?"


def repeated_experts(equal: Iterable[Sequence[str]]) -> Iterator[Moved]:
    """Tensors with the same bytes within a layer: what to say of those experts equally far apart, with them.

    `equal` are groups of tensors of one kind with the same bytes. Groups that differ in more than the expert stand
    alone.
    """
    apart: dict[tuple[int, ...], list[str]] = defaultdict(list)
    starts: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for names in equal:
        matches = [match for name in names if (match := _EXPERT.fullmatch(name))]
        if len(matches) < len(names) or len({(match[1], match[3]) for match in matches}) > 1:
            yield Moved("the same bytes", _WHICH, list(names))
            continue
        experts = sorted(int(match[2]) for match in matches)
        gaps = tuple(expert - experts[0] for expert in experts)
        apart[gaps] += names
        starts[gaps].add(experts[0])
    for gaps, names in apart.items():
        sets = [sorted(start + gap for start in starts[gaps]) for gap in gaps]
        text = f"experts {' and '.join(map(ranges, sets))} hold the same bytes"
        yield Moved(text, _LOCAL if _local(sets) else _WHICH, names)


def _local(sets: Sequence[Sequence[int]]) -> bool:
    """Whether these are the first experts of several ranks with as many each: runs of one length, the first from 0."""
    size = len(sets[0])
    return (
        size > 1
        and all(
            list(experts) == list(range(experts[0], experts[0] + size)) and experts[0] % size == 0 for experts in sets
        )
        and sets[0][0] == 0
    )
