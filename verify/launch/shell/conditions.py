"""Decides `[ ... ]` and `[[ ... ]]` where both sides are known; None where nobody can tell before the script runs."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence

from ckptkit.verify.launch.shell.operators import matches
from ckptkit.verify.launch.shell.values import ShellValue

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_TEXTS = ("=", "==", "!=", "<", ">", "=~")
# What the machine of the job has is not looked at.
_FILES = frozenset({"-e", "-f", "-d", "-r", "-w", "-x", "-s", "-L", "-h", "-p", "-S", "-t", "-v"})


def decide(words: Sequence[ShellValue], patterns: bool) -> bool | None:
    """What `[` says of these words, without the brackets; `patterns`: the right side of `==` is one, as in `[[`."""
    if any(word.maybe for word in words):
        return None
    test = _Test(list(words), patterns)
    try:
        result = test.either()
    except _NotANumberError:
        return False
    if not patterns and len(words) == 2 and test.position == 1 and words[0].known and words[0].text[:1] not in "-!(":
        return False  # `[ = x ]`, of an empty variable without quotes, is refused
    return result if test.position == len(test.words) else None


class _NotANumberError(Exception):
    """`[` fails with a message, whatever stands around the comparison."""


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
            result = any_of(result, self.both())
        return result

    def both(self) -> bool | None:
        result = self.negated()
        while self.peek() in ("&&", "-a"):
            self.position += 1
            result = opposite(any_of(opposite(result), opposite(self.negated())))
        return result

    def negated(self) -> bool | None:
        if self.peek() == "!" and self.peek(1) is not None:
            self.position += 1
            return opposite(self.negated())
        if self.peek() == "(" and self.patterns:
            self.position += 1
            result = self.either()
            self.position += 1
            return result
        return self.single()

    def single(self) -> bool | None:
        if (binary := self.peek(1)) is not None and (binary in _NUMBERS or binary in _TEXTS):
            left, right = self.words[self.position], self.words[self.position + 2 : self.position + 3]
            self.position += 3
            return self.compared(left, binary, right[0]) if right else None
        first = self.peek()
        if first in ("-z", "-n") and self.peek(1) is not None:
            value = self.words[self.position + 1]
            self.position += 2
            return None if value.gaps and not _certain(value) else (not value.text) == (first == "-z")
        if first in _FILES and self.peek(1) is not None:
            self.position += 2
            return None
        if first is None:
            return False
        self.position += 1
        value = self.words[self.position - 1]
        return None if value.gaps else bool(value.text)

    def compared(self, left: ShellValue, symbol: str, right: ShellValue) -> bool | None:
        if left.gaps or right.gaps:
            return None
        if symbol in _NUMBERS:
            whole = re.compile(r"\s*[-+]?\d{1,18}\s*")
            if not (whole.fullmatch(left.text) and whole.fullmatch(right.text)):
                if self.patterns:
                    return None  # an expression
                raise _NotANumberError
            return _NUMBERS[symbol](int(left.text), int(right.text))
        if symbol in ("<", ">", "=~"):
            return None
        equal = matches(left.text, right.text) if self.patterns else left.text == right.text
        return equal if symbol != "!=" else opposite(equal)


def _certain(value: ShellValue) -> bool:
    """Whether a text with gaps is not empty whatever they are."""
    rest = value.text
    for gap in value.gaps:
        rest = rest.replace(gap.source, "", 1)
    return bool(rest)


def opposite(value: bool | None) -> bool | None:
    """`!`, of what may be unknown."""
    return None if value is None else not value


def any_of(one: bool | None, other: bool | None) -> bool | None:
    """`||`, of what may be unknown."""
    if one or other:
        return True
    return None if one is None or other is None else False
