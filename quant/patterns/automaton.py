"""Decides whether a regular expression matches at the start of a name, reading each character once.

It follows all ways through the expression at the same time, as sets of places in it (Thompson's construction), and
remembers which set follows which. What a single character or a condition (`$`, `\\b`) means, Python's `re` itself says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from re import Pattern, _compiler  # type: ignore[attr-defined]
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from quant.patterns.cost import CEILING, Item, steps

_MOST_PLACES = 2_000
_MOST_WORK = 1_000_000  # places looked at to find sets that are not known yet: about a second
_MOST_CONDITION = 64  # steps of a condition, which may be asked at every character


class UnboundedError(Exception):
    """An expression that no bound is known for, and why, for people."""


@dataclass(frozen=True)
class _Place:
    """Where a way through the expression may be: before a character, before a condition, or where ways part."""

    then: list[int]
    character: Pattern[str] | None = None
    condition: Pattern[str] | None = None


@dataclass
class _State:
    """A set of places. `places`: those before a character; `conditions`: those to be decided first."""

    reached: frozenset[int]
    places: tuple[int, ...] = ()
    conditions: tuple[int, ...] = ()
    accepts: bool = False
    after: dict[str, _State] = field(default_factory=dict)
    decided: dict[tuple[bool, ...], _State] = field(default_factory=dict)


class Automaton:
    """A regular expression, as Python's parser reads it. Raises UnboundedError where it cannot be followed so."""

    def __init__(self, items: Iterable[Item], state: Any) -> None:
        self._state = state
        self._places: list[_Place] = []
        self._end = self._place(_Place([]))
        first = self._sequence(list(items), self._end, ())
        self._states: dict[tuple[frozenset[int], frozenset[int] | None], _State] = {}
        self._work = 0
        self._first = self._closed(frozenset({first}), None)

    def match(self, name: str) -> bool:
        """Whether a name begins with what the expression describes. Raises UnboundedError after too much work."""
        state = self._first
        if state.conditions:
            state = self._decided(state, name, 0)
        for position, character in enumerate(name, 1):
            if state.accepts or not state.places:
                break
            state = state.after.get(character) or self._step(state, character)
            if state.conditions:
                state = self._decided(state, name, position)
        return state.accepts

    # The expression becomes places, from its end to its start.

    def _place(self, place: _Place) -> int:
        if len(self._places) >= _MOST_PLACES:
            raise UnboundedError(f"written out, it has more than {_MOST_PLACES} parts")
        self._places.append(place)
        return len(self._places) - 1

    def _sequence(self, items: Iterable[Item], then: int, flags: tuple[tuple[int, int], ...]) -> int:
        for kind, value in reversed(list(items)):
            then = self._item(kind, value, then, flags)
        return then

    def _item(self, kind: Any, value: Any, then: int, flags: tuple[tuple[int, int], ...]) -> int:
        if kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            return self._place(_Place([then], character=self._compiled((kind, value), flags)))
        if kind is op.SUBPATTERN:
            _, added, removed, body = value
            return self._sequence(body, then, (*flags, (added, removed)))
        if kind is op.BRANCH:
            return self._place(_Place([self._sequence(body, then, flags) for body in value[1]]))
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            return self._repeated(value, then, flags)
        if kind is op.FAILURE:
            return self._place(_Place([]))
        if kind in (op.AT, op.ASSERT, op.ASSERT_NOT):
            if steps([(kind, value)]) > _MOST_CONDITION:
                raise UnboundedError("it looks ahead without a bound at more than one place")
            return self._place(_Place([then], condition=self._compiled((kind, value), flags)))
        raise UnboundedError("it has a reference to a group, or an atomic group, beside several repetitions")

    def _repeated(self, value: tuple[int, int, Any], then: int, flags: tuple[tuple[int, int], ...]) -> int:
        least, most, body = value
        if most is op.MAXREPEAT:
            ways: list[int] = [then]
            then = self._place(_Place(ways))
            ways.append(self._sequence(body, then, flags))
        else:
            after = then
            for _ in range(most - least):
                then = self._place(_Place([after, self._sequence(body, then, flags)]))
        for _ in range(least):
            # Also an empty body makes a place, so that no number of them is without an end.
            then = self._place(_Place([self._sequence(body, then, flags)]))
        return then

    def _compiled(self, item: Item, flags: tuple[tuple[int, int], ...]) -> Pattern[str]:
        for added, removed in reversed(flags):
            item = (op.SUBPATTERN, (None, added, removed, parser.SubPattern(self._state, [item])))
        compiled: Pattern[str] = _compiler.compile(parser.SubPattern(self._state, [item]), self._state.flags)
        return compiled

    # Sets of places, found when a name first leads to them.

    def _step(self, state: _State, character: str) -> _State:
        reached: set[int] = set()
        for number in state.places:
            place = self._places[number]
            if place.character is not None and place.character.match(character):
                reached.update(place.then)
        self._worked(len(state.places))
        state.after[character] = found = self._closed(frozenset(reached), None)
        return found

    def _decided(self, state: _State, name: str, position: int) -> _State:
        """The set after the conditions that hold at this position of a name."""
        found = [self._places[number].condition for number in state.conditions]
        holds = tuple(one is not None and one.match(name, position) is not None for one in found)
        if holds not in state.decided:
            true = frozenset(number for number, held in zip(state.conditions, holds, strict=True) if held)
            state.decided[holds] = self._closed(state.reached, true)
        return state.decided[holds]

    def _closed(self, start: frozenset[int], true: frozenset[int] | None) -> _State:
        """The places that are reached without a character. `true`: conditions that hold; None: not decided yet."""
        if (start, true) in self._states:
            return self._states[start, true]
        reached, left = set(start), list(start)
        while left:
            number = left.pop()
            place = self._places[number]
            if place.character is None and (place.condition is None or true is None or number in true):
                new = [one for one in place.then if one not in reached]
                reached.update(new)
                left += new
        self._worked(len(reached))
        conditions = tuple(number for number in sorted(reached) if self._places[number].condition is not None)
        characters = tuple(number for number in sorted(reached) if self._places[number].character is not None)
        decided = true is not None or not conditions
        found = _State(start, characters, () if decided else conditions, decided and self._end in reached)
        self._states[start, true] = found
        return found

    def _worked(self, places: int) -> None:
        self._work = min(CEILING, self._work + places + 1)
        if self._work > _MOST_WORK:
            raise UnboundedError("following all its ways through these names takes too long")
