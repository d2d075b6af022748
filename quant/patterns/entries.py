"""Entries of `ignore` and `targets`: what may be one, and which names a regular expression among them covers.

Readers decide with Python's `re.match`. Here the verdict is the same, but no expression runs without a bound: `re`
itself runs those that cannot need many steps, an automaton those that could, and what neither can is refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from re import _compiler  # type: ignore[attr-defined]
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from quant.patterns.automaton import Automaton, UnboundedError
from quant.patterns.cost import LONGEST_NAME, Item, steps

REGEX = "re:"
# Published lists have up to some hundreds of entries, all but a few of them plain names.
MOST_ENTRIES, MOST_REGULAR, MOST_COSTLY = 100_000, 1_000, 50
MOST_CHARACTERS = 2_000
# Lookups of one list, an expression counting as `_REGULAR` plain names: half a minute.
_MOST_LOOKUPS, _REGULAR = 100_000_000, 5
_MOST_STEPS = 20_000
_SHOWN = 80  # characters of an entry in a message
_WIDEST = 1_000  # characters of a range, all of which Python looks at where case is ignored
_SIMPLER = "write it with plain names, or with at most one `.*` before each part of a name that must be there"

Match = Callable[[str], object]


def check_entries(entries: Iterable[object], what: str) -> None:
    """Raises CkptkitError for entries that are none, or too many or too long ones, before any of them is used.

    `what`: where they stand, for people, such as `config.json: ignore`.
    """
    found = list(entries)
    if len(found) > MOST_ENTRIES:
        raise _refused(what, f"{len(found)} entries, and at most {MOST_ENTRIES:,} are read", _FEWER)
    for entry in found:
        if not isinstance(entry, str):
            raise _refused(what, f"{shortened(entry)} is no text", "it must be a list of module names and `re:` ones")
        if len(entry) > MOST_CHARACTERS:
            raise _refused(what, f"{_shown(entry)} has {len(entry)} characters", f"use at most {MOST_CHARACTERS:,}")
        if not entry.removeprefix(REGEX):
            raise _refused(
                what, f"pattern '{entry}' is empty", "name a module, or give a regular expression after 're:'"
            )
    regular = list(dict.fromkeys(str(entry) for entry in found if str(entry).startswith(REGEX)))
    if len(regular) > MOST_REGULAR:
        raise _refused(what, f"{len(regular)} regular expressions, and at most {MOST_REGULAR:,} are read", _FEWER)
    costly = 0
    for entry in regular:
        try:
            costly += not _expression(entry.removeprefix(REGEX)).cheap
        except CkptkitError as error:
            raise CkptkitError(f"{what}: {error.args[0]}", error.hint) from error
    if costly > MOST_COSTLY:
        raise _refused(what, f"{costly} regular expressions with several repetitions, at most {MOST_COSTLY}", _SIMPLER)


_FEWER = "name whole parts of the model with one `re:` entry each"


def check_lookups(entries: Sequence[str], names: int) -> None:
    """Raises CkptkitError where so many entries cannot be held against so many names in sensible time."""
    lookups = names * sum(_REGULAR if entry.startswith(REGEX) else 1 for entry in entries)
    if lookups > _MOST_LOOKUPS:
        raise _refused("ignore", f"{len(entries)} entries for {names} names are too many", _FEWER)


def _refused(what: str, why: str, hint: str) -> CkptkitError:
    return CkptkitError(f"{what}: {why}", hint)


def matcher(entry: str, longest: int = LONGEST_NAME + 1) -> Match:
    """What says of a name whether a `re:` entry matches from its start, as `re.match` does.

    `longest`: characters of the longest name that it will be asked about. Raises CkptkitError, here or when asked, for
    what is no regular expression and for one without a bound.
    """
    return _expression(entry.removeprefix(REGEX)).matcher(longest)


class _Expression:
    """A regular expression. `cheap`: Python's `re` needs few steps for any name of `LONGEST_NAME` characters."""

    def __init__(self, text: str) -> None:
        self._entry = _shown(REGEX + text)
        self._tree, self._python = _parsed(text)
        self.cheap = steps(self._tree) <= _MOST_STEPS
        self._linear: Match | None = None
        if not self.cheap:
            self._any_length("")  # refuses now what cannot be followed

    def matcher(self, longest: int) -> Match:
        """As the function `matcher`."""
        return self._python.match if self.cheap and longest <= LONGEST_NAME else self._any_length

    def _any_length(self, name: str) -> object:
        if self.cheap and len(name) <= LONGEST_NAME:
            return self._python.match(name)
        try:
            if self._linear is None:
                self._linear = _linear(list(self._tree), self._tree.state)
            return self._linear(name)
        except UnboundedError as error:
            raise CkptkitError(f"pattern {self._entry} could run without an end: {error}", _SIMPLER) from error


@lru_cache(maxsize=4096)
def _expression(text: str) -> _Expression:
    try:
        return _Expression(text)
    except RecursionError as error:
        raise CkptkitError(f"pattern {_shown(REGEX + text)} is nested too deeply", _SIMPLER) from error


def _shown(entry: str) -> str:
    return f"'{entry}'" if len(entry) <= _SHOWN else f"'{entry[:_SHOWN]}...'"


def _parsed(text: str) -> tuple[Any, re.Pattern[str]]:
    """The expression as Python's parser reads it, and compiled. Raises CkptkitError for what is none."""
    if len(text) > MOST_CHARACTERS:
        raise CkptkitError(f"pattern {_shown(REGEX + text)} has {len(text)} characters", _SIMPLER)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tree = parser.parse(text, 0)
            _require_narrow(tree)
            return tree, _compiler.compile(tree, 0)
    except (re.error, OverflowError, Warning) as error:
        raise CkptkitError(
            f"pattern {_shown(REGEX + text)} is no regular expression: {error}",
            "escape dots and brackets with a backslash",
        ) from error


def _require_narrow(tree: Any) -> None:
    """Raises re.error for a range of characters that would take long where case is ignored."""
    if isinstance(tree, (parser.SubPattern, list, tuple)):
        if isinstance(tree, tuple) and len(tree) == 2 and tree[0] is op.RANGE and tree[1][1] - tree[1][0] > _WIDEST:
            raise re.error(f"a range of more than {_WIDEST} characters")
        for part in tree:
            _require_narrow(part)


def _linear(items: list[Item], state: Any) -> Match:
    """A match of these items in linear time. What is looked ahead for at the start is a match of its own."""
    ahead: list[tuple[bool, Match]] = []
    while items and _is_at_start(*items[0]):
        kind, value = items.pop(0)
        if kind is not op.AT:
            ahead.append((kind is op.ASSERT, _linear(list(value[1]), state)))
    rest = Automaton(items, state).match
    return lambda name: all(bool(match(name)) is wanted for wanted, match in ahead) and rest(name)


def _is_at_start(kind: Any, value: Any) -> bool:
    """Whether an item at the start of an expression takes no character, and is decided there once and for all."""
    if kind is op.AT:
        return value in (op.AT_BEGINNING, op.AT_BEGINNING_STRING)
    return kind in (op.ASSERT, op.ASSERT_NOT) and value[0] == 1
