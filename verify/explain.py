"""`ckptkit explain`: what a check looks at and what to do about a finding; what may cause a symptom."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from ckptkit.verify.core.catalogue import retired_codes
from ckptkit.verify.core.check import Check, all_checks
from ckptkit.verify.triage.symptom import TABLE, Symptom, page_symptoms

# Words of users for the words of titles and texts here.
_SYNONYMS = {
    **dict.fromkeys(("garbage", "gibberish", "nonsense", "rubbish", "fluent"), "garbled"),
    **dict.fromkeys(("oom", "killed"), "memory"),
    **dict.fromkeys(("hang", "hangs", "hung", "stuck", "deadlock"), "timeout"),
    **dict.fromkeys(("inf", "infinity"), "infinite"),
}


def explain(words: str = "") -> str:
    """Explains the checks or symptoms (`S1`, `weight-key`) that `words` name; else a line for each that has the words.

    Whole words count, and synonyms (`oom`, `gibberish`). Those with the most of the words are listed, and first those
    whose title has them as a phrase. Without words, every check. Raises CkptkitError if nothing has any of the words.
    """
    known: dict[str, Check | Symptom] = {one.number: one for one in page_symptoms()}
    known |= {one.code: one for one in all_checks()}
    known |= {one.key.upper(): one for one in TABLE}
    retired = {code: f"{code}: retired before 0.1.0; {instead}" for code, instead in retired_codes().items()}
    codes = words.upper().split()
    if codes and all(code in known or code in retired for code in codes):
        return "\n\n\n".join(_whole(known[code]) if code in known else retired[code] for code in codes)
    wanted = [_SYNONYMS.get(word, word) for word in words.lower().split()]
    if not wanted:
        return _listed(all_checks(), "; symptoms by words of theirs: `ckptkit explain garbled`")
    matches = {one: sum(_has(word, one) for word in wanted) for one in dict.fromkeys(known.values())}
    most = max(matches.values())
    if not most:
        raise CkptkitError(f"no check or symptom is called or mentions {shortened(words)}", _hint(wanted, known))
    found = [one for one, count in matches.items() if count == most]
    if len(found) == 1:
        return _whole(found[0])
    return _listed(sorted(found, key=lambda one: " ".join(wanted) not in one.title.lower()))


def _has(word: str, one: Check | Symptom) -> bool:
    return re.search(rf"\b{re.escape(word)}(?:s|es|ed|ing)?\b", _text(one), re.IGNORECASE) is not None


def _listed(several: Sequence[Check | Symptom], also: str = "") -> str:
    commands = [f"\n       `{one.command}`" if isinstance(one, Symptom) else "" for one in several]
    lines = [f"{one.code:<5}  {one.title}{command}" for one, command in zip(several, commands, strict=True)]
    return "\n".join([*lines, "", f"next: `ckptkit explain {several[0].code}`, or another of these{also}"])


def _whole(one: Check | Symptom) -> str:
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
    """The nearest codes, or words of titles, to what was asked for."""
    titles = {word for one in known.values() for word in re.findall(r"[a-z]{3,}", one.title.lower())}
    spellings = [*(code.lower() for code in known if "-" not in code), *sorted(titles)]
    near = dict.fromkeys(match for word in wanted for match in get_close_matches(word, spellings, 3, 0.7))
    listed = [f"`ckptkit explain {known[one.upper()].code if one.upper() in known else one}`" for one in near]
    nearest = f"near it: {', '.join(listed)}; " if listed else ""
    return f"{nearest}`ckptkit explain` lists all checks by code"
