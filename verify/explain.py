"""`ckptkit explain`: what a check looks at, why that matters, and what to do about a finding."""

from __future__ import annotations

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from verify.check import all_checks


def explain(code: str) -> str:
    """Title, reason and remedy of a check. Raises CkptkitError for an unknown code, listing the known ones."""
    known = {check.code: check for check in all_checks()}
    check = known.get(code.strip().upper())
    if check is None:
        raise CkptkitError(f"there is no check {shortened(code)}", f"known: {', '.join(known)}")
    return f"{check.code}: {check.title}\n\nWhy it matters\n  {check.rationale}\n\nWhat to do\n  {check.fix}"
