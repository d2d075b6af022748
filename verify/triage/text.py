"""Formats a triage as lines of text: causes first, then effects, each with its place, meaning and next command."""

from __future__ import annotations

from collections.abc import Iterator

from verify.triage.triage import Sign, Triage


def lines(found: Triage) -> Iterator[str]:
    """Yields the report for people."""
    where = f"{', '.join(found.logs)} ({found.lines} line{'s' * (found.lines > 1)})"
    if not found.found:
        yield f"no known symptom in {where}"
        yield "  This says nothing about the checkpoint: `ckptkit preflight` and `ckptkit verify` look at the files."
    else:
        count = len(found.causes) + len(found.effects)
        yield f"{count} known symptom{'s' * (count > 1)} in {where}"
    for sign in found.causes:
        yield from _sign(sign)
    if found.effects:
        yield "effects, whose cause stands earlier:"
        for sign in found.effects:
            yield from _sign(sign)
    if found.loaded:
        yield "what was loaded, as the logs say:"
        yield from (f"  {place}" for place in found.loaded)


def _sign(sign: Sign) -> Iterator[str]:
    symptom, rest = sign.symptom, sign.count - len(sign.places)
    yield f"{symptom.title} [{symptom.key}]"
    yield from (f"  {place}" for place in sign.places)
    if rest:
        yield f"  and {rest} more line{'s' * (rest > 1)}"
    yield f"  meaning  {symptom.meaning}"
    codes = f"  ({', '.join(symptom.codes)})" if symptom.codes else ""
    yield f"  next     {symptom.command}{codes}"
