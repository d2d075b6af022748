"""`ckptkit explain`: what a check looks at and what to do about a finding; what may cause a symptom."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from verify.catalogue import retired_codes
from verify.check import Check, all_checks

_SECTION = re.compile(r"^### (S\d+)\. (.+)\n((?:[- ] .+\n)+)", re.MULTILINE)
_SHOWN = ("Causes", "Command", "In the job", "Checks")  # of a symptom's lines; the rest is for tests


@dataclass(frozen=True)
class SymptomRow:
    """What is seen in a job, by its number (`S1`); `lines` have the causes and the command that tells, by label."""

    code: str
    title: str
    lines: Mapping[str, str]


@cache
def symptom_rows() -> tuple[SymptomRow, ...]:
    """Returns the rows of docs/symptoms.md, a copy of which is installed beside this file."""
    rows = []
    for code, title, body in _SECTION.findall((Path(__file__).parent / "symptoms.md").read_text()):
        items = (" ".join(item.split()).partition(": ") for item in re.split("^- ", body, flags=re.MULTILINE)[1:])
        rows.append(SymptomRow(code, title, {label: text for label, _, text in items}))
    return tuple(rows)


def explain(words: str = "") -> str:
    """What to know of the check or symptom (`S1`) that `words` name; else a line for each whose text has them all.

    Those whose title has the words as a phrase come first. Without words that is every check. Raises CkptkitError where
    nothing has them all.
    """
    known: dict[str, Check | SymptomRow] = {one.code: one for one in symptom_rows()}
    known |= {one.code: one for one in all_checks()}
    code = words.strip().upper()
    if (named := known.get(code)) is not None:
        return _whole(named)
    if (instead := retired_codes().get(code)) is not None:
        return f"{code}: retired before 0.1.0; {instead}"
    wanted = words.lower().split()
    among = known.values() if wanted else all_checks()
    found = [one for one in among if all(word in _text(one).lower() for word in wanted)]
    if not found:
        raise CkptkitError(f"no check or symptom is called or mentions {shortened(words)}", _hint(wanted, known))
    if len(found) == 1:
        return _whole(found[0])
    found.sort(key=lambda one: " ".join(wanted) not in one.title.lower())
    symptoms = "" if wanted else "; symptoms by words of theirs: `ckptkit explain garbled`"
    more = f"next: `ckptkit explain {found[0].code}`, or another of these{symptoms}"
    commands = [f"\n       {one.lines['Command']}" if isinstance(one, SymptomRow) else "" for one in found]
    listed = [f"{one.code:<5}  {one.title}{command}" for one, command in zip(found, commands, strict=True)]
    return "\n".join([*listed, "", more])


def _whole(one: Check | SymptomRow) -> str:
    if isinstance(one, SymptomRow):
        given = (f"{label}\n  {one.lines[label]}" for label in _SHOWN if label in one.lines)
        return "\n\n".join([f"{one.code}: {one.title}", *given])
    return f"{one.code}: {one.title}\n\nWhy it matters\n  {one.rationale}\n\nWhat to do\n  {one.fix}"


def _text(one: Check | SymptomRow) -> str:
    if isinstance(one, SymptomRow):
        return f"{one.title} {one.lines['Causes']} {one.lines['Checks']}"
    return f"{one.code} {one.title} {one.rationale} {one.fix}"


def _hint(wanted: Sequence[str], known: Mapping[str, Check | SymptomRow]) -> str:
    """The nearest codes, or words of titles, to what was asked for."""
    titles = {word for one in known.values() for word in re.findall(r"[a-z]{3,}", one.title.lower())}
    spellings = [*map(str.lower, known), *sorted(titles)]
    near = dict.fromkeys(match for word in wanted for match in get_close_matches(word, spellings, 3, 0.7))
    listed = [f"`ckptkit explain {one.upper() if one.upper() in known else one}`" for one in near]
    nearest = f"near it: {', '.join(listed)}; " if listed else ""
    return f"{nearest}`ckptkit explain` lists all checks by code"
