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


def explain(words: str = "") -> str:
    """What to know of the check or symptom (`S1`, `weight-key`) that `words` name; else a line for each with all words.

    Those whose title has the words as a phrase come first. Without words that is every check. Raises CkptkitError where
    nothing has them all.
    """
    known: dict[str, Check | Symptom] = {one.number: one for one in page_symptoms()}
    known |= {one.code: one for one in all_checks()}
    known |= {one.key.upper(): one for one in TABLE}
    code = words.strip().upper()
    if (named := known.get(code)) is not None:
        return _whole(named)
    if (instead := retired_codes().get(code)) is not None:
        return f"{code}: retired before 0.1.0; {instead}"
    wanted = words.lower().split()
    among = dict.fromkeys(known.values()) if wanted else all_checks()
    found = [one for one in among if all(word in _text(one).lower() for word in wanted)]
    if not found:
        raise CkptkitError(f"no check or symptom is called or mentions {shortened(words)}", _hint(wanted, known))
    if len(found) == 1:
        return _whole(found[0])
    found.sort(key=lambda one: " ".join(wanted) not in one.title.lower())
    symptoms = "" if wanted else "; symptoms by words of theirs: `ckptkit explain garbled`"
    more = f"next: `ckptkit explain {found[0].code}`, or another of these{symptoms}"
    commands = [f"\n       `{one.command}`" if isinstance(one, Symptom) else "" for one in found]
    listed = [f"{one.code:<5}  {one.title}{command}" for one, command in zip(found, commands, strict=True)]
    return "\n".join([*listed, "", more])


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
