"""Formats a triage as lines of text: causes first, then effects, each with its place, meaning and next command."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.core.findings_text import Entry, TextReport, columns, lay_out, plain
from verify.triage.triage import Sign, Triage


def lines(found: Triage, width: int | None = None) -> Iterator[str]:
    """Yields the report for people; `width` None is that of the terminal."""
    where = f"{', '.join(found.logs)} ({found.lines} line{'s' * (found.lines > 1)})"
    count = len(found.causes) + len(found.effects)
    nothing = "That no symptom is known is not a verdict: `ckptkit preflight` and `ckptkit verify` look at the files."
    text = TextReport(
        [_entry(sign) for sign in (*found.causes, *found.effects)],
        ("", f"{count} known symptom{'s' * (count > 1)} in {where}" if count else f"no known symptom in {where}"),
        {"what was loaded, as the logs say": [str(place) for place in found.loaded]} if found.loaded else {},
        [] if found.found else [nothing],
    )
    yield from plain(lay_out(text, width or columns(), every=True))


def _entry(sign: Sign) -> Entry:
    symptom, rest = sign.symptom, sign.count - len(sign.places)
    codes = f"  ({', '.join(symptom.codes)})" if symptom.codes else ""
    fields = [("line", str(place)) for place in sign.places]
    fields += [("", f"and {rest} more line{'s' * (rest > 1)}")] if rest else []
    fields += [("meaning", symptom.meaning), ("next", f"{symptom.command}{codes}")]
    severity = "effect" if symptom.effect else "cause"
    return Entry(symptom.key, severity, "", symptom.title, fields, "", symptom.title)
