"""How many steps Python's `re` may need for a regular expression: counted from the expression, for any name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from re import IGNORECASE, _compiler  # type: ignore[attr-defined]
from re import _constants as op  # type: ignore[attr-defined]
from typing import Any

LONGEST_NAME = 200  # characters for which steps are counted; no released module's name has as many
CEILING = 1 << 40  # counts end here: what is larger is refused alike

# An operation of Python's parser and what belongs to it; a sequence of them is what has to match one after the other.
Item = tuple[Any, Any]
_REPEATS = (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT)
_SINGLE = (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN)


def steps(items: Iterable[Item]) -> int:
    """An upper bound for the steps of `re.match` on a name of at most `LONGEST_NAME` characters.

    `re` tries the ways of each item, and for each of them all of those behind it. A repetition at the end that may be
    empty is entered once, since whatever it takes is a match.
    """
    left = list(items)
    while left and left[-1][0] in _REPEATS and left[-1][1][0] == 0:
        left.pop()
    return _sequence(left)[1]


def _sequence(items: Iterable[Item]) -> tuple[int, int]:
    """In how many ways the items match from one position, at most, and the steps that try all of them."""
    ways, total, behind = 1, 0, list(items)
    for item, after in zip_longest(behind, behind[1:]):
        more, each = _item(*item)
        if after is not None and _ends_before(item, after):
            more = 1
        total = min(CEILING, total + ways * each)
        ways = min(CEILING, ways * more)
    return ways, total


def _item(kind: Any, value: Any) -> tuple[int, int]:
    if kind in _REPEATS:
        ways, total = _repeated(*value)
        return (1 if kind is op.POSSESSIVE_REPEAT else ways), total
    if kind is op.BRANCH:
        return _branch(value[1])
    if kind is op.SUBPATTERN:
        return _with_one_more(_sequence(value[-1]))
    if kind in (op.ASSERT, op.ASSERT_NOT):
        return 1, _sequence(value[1])[1] + 1
    if kind is op.ATOMIC_GROUP:
        return 1, _sequence(value)[1] + 1
    if kind is op.GROUPREF:
        return 1, LONGEST_NAME
    if kind is op.GROUPREF_EXISTS:
        return _branch([part for part in value[1:] if part is not None])
    return 1, 1


def _ends_before(item: Item, after: Item) -> bool:
    r"""Whether only the longest run of a repetition can be followed by `after`, as in `\d+\.`: none of it is a dot."""
    if item[0] not in _REPEATS or after[0] is not op.LITERAL:
        return False
    body, code = item[1][2], after[1]
    if len(body) != 1 or body[0][0] not in _SINGLE or not 31 < code < 128:
        return False
    kinds = (body.state.flags, body.state.flags | IGNORECASE)
    return not any(_compiler.compile(body, flags).match(chr(code)) for flags in kinds)


def _with_one_more(counted: tuple[int, int]) -> tuple[int, int]:
    return counted[0], counted[1] + 1


def _branch(alternatives: Sequence[Iterable[Item]]) -> tuple[int, int]:
    counted = [_sequence(alternative) for alternative in alternatives]
    return min(CEILING, sum(ways for ways, _ in counted) + 1), 1 + sum(total + 1 for _, total in counted)


def _repeated(least: int, most: int, body: Sequence[Item]) -> tuple[int, int]:
    # An iteration that takes nothing is the last one, once there are enough of them.
    limit = min(int(most), LONGEST_NAME + int(least) + 1)
    if len(body) == 1 and body[0][0] in _SINGLE:
        limit = min(limit, LONGEST_NAME)
        return limit + 1, 2 * limit + 1
    ways, each = _sequence(body)
    if ways > 1 and limit > 40:
        return CEILING, CEILING
    paths = min(CEILING, limit + 1 if ways == 1 else sum(ways**count for count in range(limit + 1)))
    return paths, min(CEILING, paths * (each + 1))
