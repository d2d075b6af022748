"""`ckptkit explain`: describes checks, the fixes of findings, and the causes of symptoms."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from ckptkit.verify.core.catalogue import retired_codes
from ckptkit.verify.core.check import Check, all_checks
from ckptkit.verify.triage.symptom import TABLE, Symptom, page_symptoms

# Words of users, and the words of the titles and texts.
_SYNONYMS = {
    **dict.fromkeys(("garbage", "gibberish", "nonsense", "rubbish", "fluent"), "garbled"),
    **dict.fromkeys(("oom", "killed"), "memory"),
    **dict.fromkeys(("hang", "hangs", "hung", "stuck", "deadlock"), "timeout"),
    **dict.fromkeys(("inf", "infinity"), "infinite"),
}


def explain(words: str = "") -> str:
    """Explains the checks or symptoms with these codes (`CK101`, `S1`, `weight-key`), or lists those with these words.

    Synonyms (`oom`, `gibberish`) count too. The list has the best matches, and begins with titles that contain the
    words as a phrase. Without words it has every check. Raises CkptkitError if nothing matches.
    """
    known: dict[str, Check | Symptom] = {one.number: one for one in page_symptoms()}
    known |= {one.code: one for one in all_checks()}
    known |= {one.key.upper(): one for one in TABLE}
    retired = {code: f"{code}: retired before 0.1.0; {instead}" for code, instead in retired_codes().items()}
    codes = words.upper().split()
    if codes and all(code in known or code in retired for code in codes):
        return "\n\n\n".join(_describe(known[code]) if code in known else retired[code] for code in codes)
    wanted = [_SYNONYMS.get(word, word) for word in words.lower().split()]
    if not wanted:
        return _format_list(all_checks(), "; find symptoms by a word: `ckptkit explain garbled`")
    patterns = [re.compile(rf"\b{re.escape(word)}(?:s|es|ed|ing)?\b", re.IGNORECASE) for word in wanted]
    matches = {one: sum(bool(word.search(_text(one))) for word in patterns) for one in dict.fromkeys(known.values())}
    most = max(matches.values())
    if not most:
        raise CkptkitError(f"no check or symptom has or contains {shortened(words)}", _hint(wanted, known))
    best = [one for one, count in matches.items() if count == most]
    if len(best) == 1:
        return _describe(best[0])
    return _format_list(sorted(best, key=lambda one: " ".join(wanted) not in one.title.lower()))


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
