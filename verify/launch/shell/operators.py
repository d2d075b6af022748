"""What `${name...}` does with a text: cutting, replacing and changing its case."""

from __future__ import annotations

import re
from fnmatch import translate

from verify.launch.shell.values import MOST_CHARACTERS


def changed_text(text: str, operator: str, argument: str) -> str | None:
    """A text after an operator with its argument; None where it is not worked out."""
    if operator in (",,", "^^") and not argument:
        return text.lower() if operator == ",," else text.upper()
    if operator in ("#", "##", "%", "%%"):
        return _trimmed(text, argument, operator)
    if operator in ("/", "//"):
        pattern, _, new = argument.partition("/")
        plain = re.sub(r"\\(.)", r"\1", pattern)
        known = plain and not set("*?[$\"'").intersection(argument)
        known = known and len(text) * max(1, len(new)) <= MOST_CHARACTERS
        return text.replace(plain, new, -1 if operator == "//" else 1) if known else None
    if operator == ":" and re.fullmatch(r"\s*\d{1,9}(?::\d{1,9})?", argument):
        start, _, count = argument.strip().partition(":")
        return text[int(start) :][: int(count) if count else None]
    return None


def _trimmed(text: str, pattern: str, operator: str) -> str | None:
    """A text without what a pattern matches at its start (`#`) or end (`%`), at most (doubled) or at least."""
    if max(len(text), len(pattern)) > 1_000:
        return None
    matches = re.compile(translate(pattern)).fullmatch
    if operator[0] == "#":
        cuts = [cut for cut in range(len(text) + 1) if matches(text[:cut])]
        return text[(max if operator == "##" else min)(cuts, default=0) :]
    cuts = [cut for cut in range(len(text) + 1) if matches(text[cut:])]
    return text[: (min if operator == "%%" else max)(cuts, default=len(text))]
