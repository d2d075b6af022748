"""What `${name...}` does with a text: cutting, replacing and changing its case; patterns, and escapes of `$'...'`."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase, translate

from ckptkit.verify.launch.shell.values import MAX_CHARACTERS

# Patterns that Python's fnmatch takes in another way than bash.
_OTHERWISE = re.compile(r"[?*+@!]\(|\[\[?[:.=]|\\")
# A pattern, up to the first slash without a backslash before it, and what replaces it.
_SUBSTITUTION = re.compile(r"((?:[^/\\]|\\.)*)(?:/(.*))?", re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}


def unescaped(text: str) -> str:
    """The text that `$'text'` stands for."""

    def character(found: re.Match[str]) -> str:
        code = found[1]
        if code[0] in "xu" and code[1:]:
            return chr(int(code[1:], 16))
        if code[0] in "01234567":
            return chr(int(code, 8) & 255)
        return _ESCAPES.get(code, code if code in "\\'\"?" else found[0])

    return _ESCAPE.sub(character, text)


def matches(text: str, pattern: str) -> bool | None:
    """Whether a text is what a pattern stands for; None for a pattern that is not worked out."""
    literal = re.sub(r"\[([*?[])\]", "", pattern)
    if _OTHERWISE.search(literal):
        return None
    return fnmatchcase(text, pattern.replace("[^", "[!"))


def changed_text(text: str, operator: str, argument: str) -> str | None:
    """A text after an operator with its argument; None where it is not worked out."""
    if operator in (",,", "^^") and not argument:
        return text.lower() if operator == ",," else text.upper()
    if operator in ("#", "##", "%", "%%"):
        known = matches("", argument) is not None
        return _trimmed(text, argument.replace("[^", "[!"), operator) if known else None
    if operator in ("/", "//"):
        parts = _SUBSTITUTION.fullmatch(argument)
        if parts is None:
            return None
        pattern, new = parts.groups(default="")
        plain = re.sub(r"\\(.)", r"\1", pattern)
        # `#` and `%` hold a pattern to an end, and `&` is what was found.
        known = bool(plain) and not set("*?[$\"'`").intersection(argument) and plain[0] not in "#%" and "&" not in new
        known = known and "\\" not in new
        known = known and len(text) * max(1, len(new)) <= MAX_CHARACTERS
        return text.replace(plain, new, -1 if operator == "//" else 1) if known else None
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
