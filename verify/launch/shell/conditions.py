"""Evaluates `[ ... ]` and `[[ ... ]]`; the result is None if it depends on a value that is unknown."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence

from ckptkit.verify.launch.shell.operators import matches
from ckptkit.verify.launch.shell.values import ShellValue

_COMPARISONS = {name: getattr(operator, name[1:]) for name in ("-eq", "-ne", "-lt", "-le", "-gt", "-ge")}
_TEXTS = ("=", "==", "!=", "<", ">", "=~")
# Files of the job's machine are not inspected.
_FILES = frozenset({"-e", "-f", "-d", "-r", "-w", "-x", "-s", "-L", "-h", "-p", "-S", "-t", "-v"})
_INTEGER = re.compile(r"\s*[-+]?\d{1,18}\s*")


def decide(words: Sequence[ShellValue], patterns: bool) -> bool | None:
    """The result of `[` for the words between its brackets; `patterns`: the right side of `==` is one, as in `[[`."""
    if any(word.condition for word in words):
        return None
    test = _Test(list(words), patterns)
    try:
        result = test.either()
    except _NotANumberError:
        return False
    if not patterns and len(words) == 2 and test.position == 1 and words[0].known and words[0].text[:1] not in "-!(":
        return False  # bash refuses `[ = x ]`, where an unquoted variable is empty
    return result if test.position == len(test.words) else None


class _NotANumberError(Exception):
    """`[` fails with a message, regardless of the rest of its expression."""


class _Test:
    def __init__(self, words: list[ShellValue], patterns: bool) -> None:
        self.words, self.patterns = words, patterns
        self.position = 0

    def peek(self, ahead: int = 0) -> str | None:
        at = self.position + ahead
        return self.words[at].text if at < len(self.words) else None

    def either(self) -> bool | None:
        result = self.both()
        while self.peek() in ("||", "-o"):
            self.position += 1
            result = either(result, self.both())
        return result

    def both(self) -> bool | None:
        result = self.negated()
        while self.peek() in ("&&", "-a"):
            self.position += 1
            result = negate(either(negate(result), negate(self.negated())))
        return result

    def negated(self) -> bool | None:
        if self.peek() == "!" and self.peek(1) is not None:
            self.position += 1
            return negate(self.negated())
        if self.peek() == "(" and self.patterns:
            self.position += 1
            result = self.either()
            self.position += 1
            return result
        return self.single()

    def single(self) -> bool | None:
        first, second = self.peek(), self.peek(1)
        if first is None:
            return False
        if second in _COMPARISONS or second in _TEXTS:
            left, right = self.words[self.position], self.words[self.position + 2 : self.position + 3]
            self.position += 3
            return self.compare(left, second, right[0]) if right else None
        if first in ("-z", "-n") and second is not None:
            value = self.words[self.position + 1]
            self.position += 2
            return None if value.gaps and not _is_never_empty(value) else (not value.text) == (first == "-z")
        if first in _FILES and second is not None:
            self.position += 2
            return None
        self.position += 1
        value = self.words[self.position - 1]
        return None if value.gaps else bool(value.text)

    def compare(self, left: ShellValue, symbol: str, right: ShellValue) -> bool | None:
        if left.gaps or right.gaps:
            return None
        if symbol in _COMPARISONS:
            if not (_INTEGER.fullmatch(left.text) and _INTEGER.fullmatch(right.text)):
                if self.patterns:
                    return None  # an expression
                raise _NotANumberError
            return bool(_COMPARISONS[symbol](int(left.text), int(right.text)))
        if symbol in ("<", ">", "=~"):
            return None
        equal = matches(left.text, right.text) if self.patterns else left.text == right.text
        return equal if symbol != "!=" else negate(equal)


def _is_never_empty(value: ShellValue) -> bool:
    """Whether a text with gaps has other text too."""
    text = value.text
    for gap in value.gaps:
        text = text.replace(gap.source, "", 1)
    return bool(text)


def negate(value: bool | None) -> bool | None:
    """`!` for a value that may be unknown."""
    return None if value is None else not value


def either(left: bool | None, right: bool | None) -> bool | None:
    """`||` for values that may be unknown."""
    if left or right:
        return True
    return None if left is None or right is None else False
