"""Formats a diff as lines of text: differences by kind, the worst first, the numbers of tensors, the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptkit.core.findings_text import Entry, TextReport, columns, lay_out, plain
from ckptkit.core.progress import size
from ckptkit.core.specs import summarize
from ckptkit.verify.diff.result import Diff, Kind, Pair
from ckptkit.verify.evidence.folding import by_key

_SHOWN = 20  # lines of a kind of difference
_WORDS = {
    **{state: state for state in ("equal", "cast", "moved", "differing")},
    "only_a": "only in A",
    "only_b": "only in B",
    "redundant": "redundant",
    "unread": "compared by name and shape only",
}


def diff_lines(found: Diff) -> Iterator[str]:
    """Yields the report for people."""
    counts = found.counts
    closing = [f"A  {found.a} ({found.formats[0]})", f"B  {found.b} ({found.formats[1]})"]
    if found.kinds:
        closing.append("d = A - B; mean/std in standard deviations of A")
    listed = ", ".join(f"{counts[key]} {words}" for key, words in _WORDS.items() if counts[key])
    closing.append(f"{listed}; {size(found.nbytes)} read")
    word, rest = verdict(found).split("  ", 1)
    sections = {"notes": found.notes} if found.notes else {}
    text = TextReport(list(_entries(found)), (word, f"  {rest}"), sections, closing)
    yield from plain(lay_out(text, columns(), every=True))


def _entries(found: Diff) -> Iterator[Entry]:
    for kind, body in (
        ("files", list(found.files)),
        ("moved", [f"{move.text}: {_folded(move.names, 3)}" for move in found.moves]),
        ("differing", [_kind(kind) for kind in found.kinds]),
        ("only in A", [_folded([pair.name for pair in found.only_a])]),
        ("only in B", [_folded([pair.name for pair in found.only_b])]),
        ("cast", _dtypes(found.cast)),
        ("dtype", _dtypes(found.other_dtypes)),
        ("redundant", [_folded(found.redundant)]),
    ):
        body = list(filter(None, body))
        severity = "note" if kind == "redundant" or (kind in ("cast", "dtype") and not found.exact) else "error"
        yield from (Entry(kind, severity, "", line) for line in body[:_SHOWN])
        if len(body) > _SHOWN:
            yield Entry(kind, severity, "", f"and {len(body) - _SHOWN} lines more, all of them in --json")


def verdict(found: Diff) -> str:
    """One line: EQUAL, DIFFERENT with the numbers, or INCONCLUSIVE."""
    counts = found.counts
    total = sum(counts.values())
    if found.status == "equal":
        cast = f", {counts['cast']} of them after a cast" if counts["cast"] else ", bit for bit"
        return f"EQUAL  {total} tensors{cast}"
    if found.status == "inconclusive":
        return f"INCONCLUSIVE  names and shapes are alike, values were not read, of {total} tensors"
    wrong = ["moved", "differing", "only_a", "only_b", *(["cast"] if found.exact else [])]
    listed = ", ".join(f"{counts[key]} {_WORDS[key]}" for key in wrong if counts[key])
    names = ", ".join(dict.fromkeys(line.split(" ", 1)[0] for line in found.files))
    same = "unread" if found.unread else "equal"
    tensors = f"{listed}, of {total} tensors" if listed else f"{total} tensors are {same}"
    return f"DIFFERENT  {tensors}{'; ' if names else ''}{names}"


def _folded(names: Sequence[str], limit: int = 5) -> str:
    return summarize(names, limit) + f" ({len(names)} tensors)" * (len(names) > 1) if names else ""


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
    both = ((pair.name, pair.a, pair.b) for pair in pairs)
    by_dtype = by_key((f"{a.dtype} in A, {b.dtype} in B", name) for name, a, b in both if a and b)
    return [f"{_folded(names)}: {dtypes}" for dtypes, names in by_dtype.items()]
