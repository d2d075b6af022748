"""The operators of `${name...}`: trimming, replacing and changing case; also patterns, and escapes of `$'...'`."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase, translate

from ckptkit.verify.launch.python.values import MAX_CHARACTERS

# Patterns that Python's fnmatch reads differently from bash.
_UNSUPPORTED = re.compile(r"[?*+@!]\(|\[\[?[:.=]|\\")
# A pattern, up to the first slash without a backslash before it, and its replacement.
_SUBSTITUTION = re.compile(r"((?:[^/\\]|\\.)*)(?:/(.*))?", re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}


def decode_escapes(text: str) -> str:
    """The value of `$'text'`."""

    def character(match: re.Match[str]) -> str:
        code = match[1]
        if code[0] in "xu" and code[1:]:
            return chr(int(code[1:], 16))
        if code[0] in "01234567":
            return chr(int(code, 8) & 255)
        return _ESCAPES.get(code, code if code in "\\'\"?" else match[0])

    return _ESCAPE.sub(character, text)


def matches(text: str, pattern: str) -> bool | None:
    """Whether a pattern matches all of a text, or None if this module does not support the pattern."""
    if _UNSUPPORTED.search(re.sub(r"\[([*?[])\]", "", pattern)):
        return None
    return fnmatchcase(text, pattern.replace("[^", "[!"))


def apply_operator(text: str, operator: str, argument: str) -> str | None:
    """The text after an operator with its argument, or None if this module does not support them."""
    if operator in (",,", "^^") and not argument:
        return text.lower() if operator == ",," else text.upper()
    if operator in ("#", "##", "%", "%%"):
        return None if matches("", argument) is None else _trim(text, argument.replace("[^", "[!"), operator)
    if operator in ("/", "//") and (parts := _SUBSTITUTION.fullmatch(argument)):
        pattern, new = parts.groups(default="")
        plain = re.sub(r"\\(.)", r"\1", pattern)
        # `#` and `%` tie a pattern to the start or the end, and `&` is the matched text.
        supported = plain and plain[0] not in "#%" and not set("*?[$\"'`").intersection(argument)
        if supported and not set("&\\").intersection(new) and len(text) * max(1, len(new)) <= MAX_CHARACTERS:
            return text.replace(plain, new, -1 if operator == "//" else 1)
    return None


def _trim(text: str, pattern: str, operator: str) -> str | None:
    """Removes the match of a pattern at the start (`#`) or the end (`%`): the longest for a doubled operator."""
    if max(len(text), len(pattern)) > 1_000:
        return None
    matches = re.compile(translate(pattern)).fullmatch
    if operator[0] == "#":
        ends = [end for end in range(len(text) + 1) if matches(text[:end])]
        return text[(max if operator == "##" else min)(ends, default=0) :]
    starts = [start for start in range(len(text) + 1) if matches(text[start:])]
    return text[: (min if operator == "%%" else max)(starts, default=len(text))]
