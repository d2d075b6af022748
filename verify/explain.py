"""`ckptkit explain`: describes checks, the fixes of findings, and the causes of symptoms."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from ckptkit.verify.core.catalogue import retired_codes
from ckptkit.verify.core.check import Check, all_checks
from ckptkit.verify.triage.symptom import TABLE, Symptom, page_symptoms

_LISTED = 10  # entries
# Words of users, and the words of the titles and texts.
_SYNONYMS = {
    **dict.fromkeys(("garbage", "gibberish", "nonsense", "rubbish", "fluent"), "garbled"),
    **dict.fromkeys(("oom", "killed"), "memory"),
    **dict.fromkeys(("hang", "hangs", "hung", "stuck", "deadlock"), "timeout"),
    **dict.fromkeys(("inf", "infinity", "nan"), "infinite"),
}


def explain(words: str = "") -> str:
    """Explains checks or symptoms by their codes (`CK101`, `S1`, `weight-key`), or those that the words are about.

    A line of a log is about the symptoms that `triage` finds in it. Other words and their synonyms (`oom`, `gibberish`)
    count more if few texts have them, and in titles. The best match is first. Without words, lists every check. Raises
    CkptkitError if nothing matches.
    """
    known: dict[str, Check | Symptom] = {one.number: one for one in page_symptoms()}
    known |= {one.code: one for one in all_checks()}
    known |= {one.key.upper(): one for one in TABLE}
    retired = {code: f"{code}: retired before 0.1.0; {instead}" for code, instead in retired_codes().items()}
    codes = words.upper().split()
    if codes and all(code in known or code in retired for code in codes):
        return "\n\n\n".join(_describe(known[code]) if code in known else retired[code] for code in codes)
    if not (wanted := re.findall(r"[\w-]+", words.lower())):
        return _format_list(all_checks(), "; find symptoms by a word: `ckptkit explain garbled`")
    best: list[Check | Symptom]
    if logged := [one for one in TABLE if one.matches(words) and any(needle in words for needle in one.needles)]:
        best = [*sorted(logged, key=lambda one: len(one.near))]
    else:
        scores = _scores(wanted, dict.fromkeys(known.values()))
        most = max(scores.values())
        best = sorted((one for one, score in scores.items() if score > most / 2), key=lambda one: -scores[one])
    if not best:
        raise CkptkitError(f"no check or symptom has or contains {shortened(words)}", _hint(wanted, known))
    return _describe(best[0]) if len(best) == 1 else _format_list(best[:_LISTED])


def _scores(wanted: Sequence[str], entries: Collection[Check | Symptom]) -> dict[Check | Symptom, float]:
    """The match of each entry: the rarer a word, the more it counts, and twice in a title, above all at its start."""
    scores = dict.fromkeys(entries, 0.0)
    for word in dict.fromkeys([*wanted, *(_SYNONYMS[word] for word in wanted if word in _SYNONYMS)]):
        pattern = re.compile(rf"\b{re.escape(word)}(?:s|es|ed|ing)?\b", re.IGNORECASE)
        if matches := [one for one in entries if pattern.search(_text(one))]:
            rarity = math.log(len(entries) / len(matches))
            for one in matches:
                place = pattern.search(title := f"{one.code} {one.title}")
                scores[one] += rarity * (2 - (place.start() + len(title) / 10) / 500 if place else 1)
    return scores


def _format_list(several: Sequence[Check | Symptom], also: str = "") -> str:
    commands = [f"\n       `{one.command}`" if isinstance(one, Symptom) else "" for one in several]
    lines = [f"{one.code:<5}  {one.title}{command}" for one, command in zip(several, commands, strict=True)]
    return "\n".join([*lines, "", f"next: `ckptkit explain {several[0].code}`, or another of these{also}"])


def _describe(one: Check | Symptom) -> str:
    if isinstance(one, Check):
        return f"{one.code}: {one.title}\n\nWhy it matters\n  {one.rationale}\n\nWhat to do\n  {one.fix}"
    parts = {
        "Causes": one.meaning,
        "Command": f"`{one.command}`",
        "In the job": one.job,
        "Checks": ", ".join(one.codes),
    }
    return "\n\n".join([f"{one.code}: {one.title}", *(f"{label}\n  {text}" for label, text in parts.items() if text)])


def _text(one: Check | Symptom) -> str:
    if isinstance(one, Check):
        return f"{one.code} {one.title} {one.rationale} {one.fix}"
    return " ".join((one.key, one.title, one.meaning, *one.needles, *one.codes))


def _hint(wanted: Sequence[str], known: Mapping[str, Check | Symptom]) -> str:
    """Suggests the codes, or words of titles, nearest to the request."""
    titles = {word for one in known.values() for word in re.findall(r"[a-z]{3,}", one.title.lower())}
    spellings = [*(code.lower() for code in known if "-" not in code), *sorted(titles)]
    near = dict.fromkeys(match for word in wanted for match in get_close_matches(word, spellings, 3, 0.7))
    listed = [f"`ckptkit explain {known[one.upper()].code if one.upper() in known else one}`" for one in near]
    nearest = f"similar: {', '.join(listed)}; " if listed else ""
    return f"{nearest}`ckptkit explain` lists all checks by code"
