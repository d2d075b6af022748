"""Regular expressions of `ignore` and `targets`: matched by Python, but refused if they could run for long.

Readers decide with Python's `re.match`, and so does this module. It counts the steps that `re` may need for an
expression before a match, which cannot be interrupted, and also measures the time of expressions that are not cheap.
The count uses the tree of Python's parser, the private `re._parser`, because another parser could read an expression
differently. Unknown parts of the tree, as in another Python, count as infinite.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from time import thread_time
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened

MAX_NAME = 200  # characters, more than in the name of any released module
CEILING = 1 << 60  # the largest count

_parse: Callable[[str], Iterable[tuple[object, Any]]] = import_module("re._parser").parse
_SINGLE = ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT")
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


@dataclass(frozen=True)
class _Cost:
    """The largest number of ways in which a part matches from one position, and the steps to try all of them."""

    ways: int
    steps: int
    single: bool = False  # matches exactly one character
    optional: bool = False  # a repetition that may match nothing


def _sequence(items: Iterable[tuple[object, Any]], longest: int, at_the_end: bool = False) -> _Cost:
    """Bounds the steps of `re.match` for parsed parts in a row, on a name of at most `longest` characters.

    `re` tries the ways of each part, and for each of them all of those after it. An optional repetition at the end is
    entered once, since it always matches. `at_the_end`: a match of these parts is a match of the expression.
    """
    pairs = list(items)
    parts = [_part(str(name), value, longest) for name, value in pairs[:-1]]
    parts += [_part(str(name), value, longest, at_the_end) for name, value in pairs[-1:]]
    if len(parts) == 1 and parts[0].single:
        return parts[0]
    while at_the_end and parts and parts[-1].optional:
        parts.pop()
    ways, total = 1, 0
    for part in parts:
        total = _capped(total + ways * part.steps)
        ways = _capped(ways * part.ways)
    return _Cost(ways, total)


def _part(name: str, value: Any, longest: int, at_the_end: bool = False) -> _Cost:
    """References to groups and conditions on them, which names of modules do not need, count as infinite."""
    if name in _SINGLE:
        return _Cost(1, 1, single=True)
    if name == "BRANCH":
        found = [_sequence(items, longest, at_the_end) for items in value[1]]
        return _Cost(_capped(sum(cost.ways for cost in found)), _capped(sum(cost.steps + 1 for cost in found) + 1))
    if name in _REPEATS:
        return _repeated(_sequence(value[2], longest), value[0], value[1], longest, name == "POSSESSIVE_REPEAT")
    if name == "SUBPATTERN":
        inner = _sequence(value[3], longest)
        return _Cost(inner.ways, inner.steps + 1)
    if name in ("ASSERT", "ASSERT_NOT", "ATOMIC_GROUP"):  # decided once
        return _Cost(1, _sequence(value if name == "ATOMIC_GROUP" else value[1], longest).steps + 1)
    return _Cost(CEILING, CEILING)


def _repeated(body: _Cost, least: int, most: int, longest: int, possessive: bool) -> _Cost:
    # After `least` iterations, one that matches nothing is the last.
    limit = min(int(most), longest + (0 if body.single else least + 1))
    if body.ways > 1 and limit > 40:
        return _Cost(CEILING, CEILING)
    ways = _capped(limit + 1 if body.ways == 1 else sum(body.ways**count for count in range(limit + 1)))
    total = 2 * limit + 1 if body.single else _capped(ways * (body.steps + 1))
    return _Cost(1 if possessive else ways, total, optional=least == 0)


def _capped(count: int) -> int:
    return min(CEILING, count)


REGEX = "re:"
# Published lists have up to some hundreds of entries, all but a few of them plain names.
MAX_ENTRIES, MAX_REGULAR, MAX_COSTLY = 100_000, 1_000, 50
MAX_CHARACTERS = 2_000
# Lookups of one list, an expression counting as `_REGULAR` plain names: half a minute.
_MAX_LOOKUPS, _REGULAR = 100_000_000, 5
_CHEAP_STEPS = 20_000  # an expression below is not timed
_MAX_STEPS = 30_000_000_000  # four times `.*`, each before a required word: seconds for the worst name
# The time of matches longer than `_SLOW` is limited for each expression; real names take a hundredth of it.
_SLOW, _MAX_SECONDS = 200e-6, 3.0
_SHOWN = 80  # characters of an entry in a message
# A range of characters that may be wide: Python looks at each of them where case is ignored.
_WIDE_RANGE = re.compile(r"-(?:[^\x00-\x7f]|\\[xuUN0-7])")
_SIMPLER = "simplify the pattern: use plain names, or few `.*` outside repetitions"

Match = Callable[[str], object]


def check_entries(entries: Iterable[object], where: str) -> None:
    """Raises CkptkitError for invalid, too many or too long entries; `where`: their location in messages."""
    patterns = list(entries)
    if len(patterns) > MAX_ENTRIES:
        raise CkptkitError(f"{where}: {len(patterns)} entries, but ckptkit reads at most {MAX_ENTRIES:,}", _FEWER)
    for entry in patterns:
        if not isinstance(entry, str):
            message = f"{where}: {shortened(entry)} is not a string"
            raise CkptkitError(message, "write a list of module names and `re:` patterns")
        if len(entry) > MAX_CHARACTERS:
            message = f"{where}: {_shorten(entry)} has {len(entry)} characters"
            raise CkptkitError(message, f"use at most {MAX_CHARACTERS:,}")
        if not entry.removeprefix(REGEX):
            hint = "write a module name, or a regular expression after 're:'"
            raise CkptkitError(f"{where}: pattern '{entry}' is empty", hint)
    regular = list(dict.fromkeys(str(entry) for entry in patterns if str(entry).startswith(REGEX)))
    if len(regular) > MAX_REGULAR:
        message = f"{where}: {len(regular)} regular expressions, but ckptkit reads at most {MAX_REGULAR:,}"
        raise CkptkitError(message, _FEWER)
    costly = 0
    for entry in regular:
        try:
            costly += not _expression(entry.removeprefix(REGEX)).cheap
        except CkptkitError as error:
            raise CkptkitError(f"{where}: {error.args[0]}", error.hint) from error
    if costly > MAX_COSTLY:
        message = f"{where}: {costly} regular expressions with repetitions, but at most {MAX_COSTLY} are allowed"
        raise CkptkitError(message, _SIMPLER)


_FEWER = "use one `re:` entry for a larger part of the model"


def check_lookups(entries: Sequence[str], names: int) -> None:
    """Raises CkptkitError if comparing these entries with this number of names would take too long."""
    if names * sum(_REGULAR if entry.startswith(REGEX) else 1 for entry in entries) > _MAX_LOOKUPS:
        raise CkptkitError(f"`ignore` has too many entries ({len(entries)}) for {names} names", _FEWER)


def matcher(entry: str, longest: int = MAX_NAME + 1) -> Match:
    """Returns a function that tests if a `re:` entry matches from the start of a name, like `re.match`.

    `longest`: the length of the longest name. Raises CkptkitError, here or during a match, for text that is not a
    regular expression and for one that could run too long.
    """
    expression = _expression(entry.removeprefix(REGEX), min(longest, MAX_NAME))
    return expression.python.match if expression.cheap and longest <= MAX_NAME else expression.match


class _Expression:
    """A regular expression. `cheap`: Python's `re` needs few steps for any name of `longest` characters."""

    def __init__(self, text: str, longest: int) -> None:
        self._text, self._longest = text, longest
        self.python = _compiled(text)
        self.cheap = self._steps(longest) <= _CHEAP_STEPS
        self._seconds = 0.0

    def match(self, name: str) -> object:
        """Matches from the start of a name. Raises CkptkitError for too long a name, and after too many slow ones."""
        if len(name) > self._longest:
            self._steps(len(name))
        begin = thread_time()
        found = self.python.match(name)
        taken = thread_time() - begin
        if taken > _SLOW:
            self._seconds += taken
            if self._seconds > _MAX_SECONDS:
                raise CkptkitError(f"pattern {_shorten(REGEX + self._text)} takes too long for these names", _SIMPLER)
        return found

    def _steps(self, longest: int) -> int:
        """The steps for a name of this length. Raises CkptkitError if they are too many."""
        steps = _sequence(_parse(self._text), longest, at_the_end=True).steps
        if steps > _MAX_STEPS:
            message = f"pattern {_shorten(REGEX + self._text)} could run forever for a name of {longest} characters"
            raise CkptkitError(message, _SIMPLER)
        return steps


@lru_cache(maxsize=4096)
def _expression(text: str, longest: int = MAX_NAME) -> _Expression:
    try:
        return _Expression(text, longest)
    except RecursionError as error:
        raise CkptkitError(f"pattern {_shorten(REGEX + text)} is nested too deeply", _SIMPLER) from error


def _shorten(entry: str) -> str:
    return f"'{entry}'" if len(entry) <= _SHOWN else f"'{entry[:_SHOWN]}...'"


def _compiled(text: str) -> re.Pattern[str]:
    """The compiled expression. Raises CkptkitError for text that is not one."""
    if len(text) > MAX_CHARACTERS:
        raise CkptkitError(f"pattern {_shorten(REGEX + text)} has {len(text)} characters", _SIMPLER)
    try:
        if _WIDE_RANGE.search(text):
            raise re.error("a range of characters that ends outside ASCII")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return re.compile(text)
    except (re.error, OverflowError, Warning) as error:
        message = f"pattern {_shorten(REGEX + text)} is not a regular expression: {error}"
        raise CkptkitError(message, "escape dots and brackets with a backslash") from error
