"""Formats a diff as lines of text: the verdict, what was compared, and each kind of difference, the worst first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ckptkit.core.specs import summarize
from verify.diff.pairs import Pair
from verify.diff.result import Diff, Kind
from verify.reports.text import size

_SHOWN = 20  # lines of a kind of difference


def lines(found: Diff) -> Iterator[str]:
    """Yields the report for people."""
    yield verdict(found)
    yield f"  A  {found.a} ({found.formats[0]})"
    yield f"  B  {found.b} ({found.formats[1]})"
    counts = found.counts
    said = (f"{counts[key]} {words}" for key, words in _WORDS.items())
    yield f"  {', '.join(said)}; {size(found.nbytes)} read"
    for note in found.notes:
        yield f"note: {note}"
    yield from _section("moved", _moves(found))
    yield from _section("differing, the worst first: d = A - B; mean/std in standard deviations of A", _kinds(found))
    yield from _section("cast to another dtype, otherwise equal", _dtypes(found.cast))
    yield from _section("only in A", _names(found.only_a))
    yield from _section("only in B", _names(found.only_b))
    yield from _section("only on one side, and following from the rest", [_folded(found.redundant)])


_WORDS = {
    "equal": "equal",
    "cast": "cast",
    "moved": "moved",
    "differing": "differing",
    "only_a": "only in A",
    "only_b": "only in B",
    "redundant": "redundant",
}


def verdict(found: Diff) -> str:
    """One line: EQUAL or DIFFERENT, and in what."""
    counts = found.counts
    total = sum(counts.values())
    if found.status == "equal":
        cast = f", {counts['cast']} of them after a cast" if counts["cast"] else ", bit for bit"
        return f"EQUAL  {total} tensors{cast}"
    wrong = ["moved", "differing", "only_a", "only_b", *(["cast"] if found.exact else [])]
    said = ", ".join(f"{counts[key]} {_WORDS[key]}" for key in wrong if counts[key])
    return f"DIFFERENT  {said}, of {total} tensors"


def _section(title: str, body: Sequence[str]) -> Iterator[str]:
    if any(body):
        yield f"{title}:"
        yield from (f"  {line}" for line in body[:_SHOWN])
        if len(body) > _SHOWN:
            yield f"  and {len(body) - _SHOWN} lines more, all of them in --json"


def _folded(names: Sequence[str], limit: int = 5) -> str:
    count = f" ({len(names)} tensors)" if len(names) > 1 else ""
    return summarize(names, limit) + count if names else ""


def _moves(found: Diff) -> list[str]:
    return [f"{move.text}: {_folded(move.names, 3)}" for move in found.moves]


def _kinds(found: Diff) -> list[str]:
    return [_kind(kind) for kind in found.kinds]


def _kind(kind: Kind) -> str:
    worst, name = kind.worst, _folded(kind.names)
    if worst.distance is None and worst.a and worst.b:
        return f"{name}: shape {list(worst.a.shape)} in A and {list(worst.b.shape)} in B"
    assert worst.distance is not None  # only tensors of different shapes have none
    cosine = "none" if kind.cosine is None else f"{kind.cosine:.6f}"
    numbers = (
        f"max |d| {kind.largest:.3g}, mean |d| {kind.mean:.3g}, cosine {cosine}, mean/std {kind.relative:.3g}; "
        f"{worst.distance.unequal} of {worst.distance.elements} elements"
    )
    where = f" in {worst.name}" if len(kind.names) > 1 else ""
    damaged = f", {worst.distance.not_finite} of them not finite" if worst.distance.not_finite else ""
    return f"{name}: {numbers}{where}{damaged}"


def _dtypes(pairs: Sequence[Pair]) -> list[str]:
    by_dtype: dict[str, list[str]] = defaultdict(list)
    for pair in pairs:
        if pair.a and pair.b:
            by_dtype[f"{pair.a.dtype} in A, {pair.b.dtype} in B"].append(pair.name)
    return [f"{_folded(names)}: {dtypes}" for dtypes, names in by_dtype.items()]


def _names(pairs: Sequence[Pair]) -> list[str]:
    return [_folded([pair.name for pair in pairs])] if pairs else []
