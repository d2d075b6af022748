"""`ckptkit explain`: what a check looks at, why that matters, and what to do about a finding."""

from __future__ import annotations

from collections.abc import Iterable

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from verify.check import Check, all_checks


def explain(words: str = "") -> str:
    """Title, reason and remedy of the check whose code `words` is; else a line for each check that has them all.

    Without words that is every check. Raises CkptkitError where there is no such check.
    """
    known = {check.code: check for check in all_checks()}
    if (check := known.get(words.strip().upper())) is not None:
        return f"{check.code}: {check.title}\n\nWhy it matters\n  {check.rationale}\n\nWhat to do\n  {check.fix}"
    wanted = words.lower().split()
    found = [one for one in known.values() if all(word in _text(one) for word in wanted)]
    if not found:
        raise CkptkitError(f"there is no check {shortened(words)}, and none whose text has these words", _hint(known))
    if len(found) == 1:
        return explain(found[0].code)
    return "\n".join([*(f"{one.code}  {one.title}" for one in found), "", "next: `ckptkit explain CODE`"])


def _text(check: Check) -> str:
    return f"{check.code} {check.title} {check.rationale} {check.fix}".lower()


def _hint(codes: Iterable[str]) -> str:
    return f"`ckptkit explain` lists all; known: {', '.join(codes)}"
