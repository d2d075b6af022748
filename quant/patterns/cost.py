"""Bounds the steps that Python's `re` may need for a regular expression, counted from its text."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_NAME = 200  # characters; no released module's name has as many
CEILING = 1 << 60  # counts end here

_QUANTIFIER = re.compile(r"(?:([*+?])|\{(?!\})(\d*)(,?)(\d*)\})([?+]?)")
_CLASS = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*\]", re.DOTALL)
_GROUP = re.compile(r"\((?:(\?(?:<?[=!]|>))|\?P<\w+>|\?[aimsLu-]*:|(?!\?))")
_FLAGS = re.compile(r"\(\?[aimsLu]+\)")
_REFERENCE = re.compile(r"\\[1-9]\d?|\(\?P=\w+\)")
_SINGLE = re.compile(r"\\.|.", re.DOTALL)


class UnknownSyntaxError(Exception):
    """An expression with a construct whose cost is not known. The argument is its text from there on."""


@dataclass(frozen=True)
class _Cost:
    """The ways in which a part matches from one position, at most, and the steps that try all of them."""

    ways: int
    steps: int
    single: bool = False  # matches exactly one character
    optional: bool = False  # a repetition that may match nothing


def steps(text: str, longest: int = MAX_NAME) -> int:
    """An upper bound for the steps of `re.match` on a name of at most `longest` characters.

    `re` tries the ways of each part, and for each of them all of those after it. A repetition at the end that may be
    empty is entered once, since whatever it takes is a match. `text` must compile. Raises UnknownSyntaxError for
    constructs that names of modules do not need: references, comments and conditions on groups.
    """
    return _Counter(text, longest).alternatives(at_the_end=True).steps


class _Counter:
    """Reads an expression from left to right."""

    def __init__(self, text: str, longest: int) -> None:
        self._text, self._longest, self._position = text, longest, 0

    def alternatives(self, at_the_end: bool = False) -> _Cost:
        """Reads up to the end of the expression or of the group. `at_the_end`: a match of this part is the verdict."""
        found = [self._sequence(at_the_end)]
        while self._text.startswith("|", self._position):
            self._position += 1
            found.append(self._sequence(at_the_end))
        if len(found) == 1:
            return found[0]
        return _Cost(_capped(sum(cost.ways for cost in found)), _capped(sum(cost.steps + 1 for cost in found) + 1))

    def _sequence(self, at_the_end: bool) -> _Cost:
        parts: list[_Cost] = []
        while self._position < len(self._text) and self._text[self._position] not in "|)":
            if not self._take(_FLAGS):
                parts.append(self._repeated(self._part()))
        while at_the_end and parts and parts[-1].optional:
            parts.pop()
        ways, total = 1, 0
        for part in parts:
            total = _capped(total + ways * part.steps)
            ways = _capped(ways * part.ways)
        return _Cost(ways, total)

    def _part(self) -> _Cost:
        if self._text[self._position] == "(":
            return self._group()
        if _REFERENCE.match(self._text, self._position) or not (self._take(_CLASS) or self._take(_SINGLE)):
            raise UnknownSyntaxError(self._text[self._position :])
        return _Cost(1, 1, single=True)

    def _group(self) -> _Cost:
        opening = self._take(_GROUP)
        if opening is None:
            raise UnknownSyntaxError(self._text[self._position :])
        inner = self.alternatives()
        self._position += 1  # the closing parenthesis
        decided_once = opening[1] is not None  # a lookaround or an atomic group
        return _Cost(1 if decided_once else inner.ways, inner.steps + 1)

    def _repeated(self, body: _Cost) -> _Cost:
        found = self._take(_QUANTIFIER)
        if found is None:
            return body
        sign, low, comma, high, mode = found.groups()
        least = int(low or 0) if sign is None else int(sign == "+")
        most = 1 if sign == "?" else int(high or 0) if comma and high else least if low and not comma else CEILING
        # An iteration that takes nothing is the last one, once there are enough of them.
        limit = min(most, self._longest + (0 if body.single else least + 1))
        if body.ways > 1 and limit > 40:
            return _Cost(CEILING, CEILING)
        ways = _capped(limit + 1 if body.ways == 1 else sum(body.ways**count for count in range(limit + 1)))
        total = 2 * limit + 1 if body.single else _capped(ways * (body.steps + 1))
        return _Cost(1 if mode == "+" else ways, total, optional=least == 0)

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._text, self._position)
        if found is not None:
            self._position = found.end()
        return found


def _capped(count: int) -> int:
    return min(CEILING, count)
