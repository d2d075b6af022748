"""The known name that a misspelled one was meant to be."""

from __future__ import annotations

from collections.abc import Iterable


def distance(one: str, other: str, most: int) -> int:
    """How many letters must be added, left out, replaced or exchanged with their neighbour; above `most`, `most` + 1.

    Source: the optimal string alignment distance.
    """
    if abs(len(one) - len(other)) > most:
        return most + 1
    before: list[int] = []
    last = list(range(len(other) + 1))
    for row, letter in enumerate(one, 1):
        now = [row]
        for column, there in enumerate(other, 1):
            cost = min(last[column] + 1, now[-1] + 1, last[column - 1] + (letter != there))
            if before and column > 1 and letter == other[column - 2] and one[row - 2] == there:
                cost = min(cost, before[column - 2] + 1)
            now.append(cost)
        before, last = last, now
        if min(last) > most and min(before) > most:  # an exchange of neighbours looks back two rows
            return most + 1
    return min(last[-1], most + 1)


def nearest(name: str, known: Iterable[str], most: int) -> str | None:
    """The known name nearest to this one, at most `most` letters away; None where there is none."""
    found = min(((distance(name, one, most), one) for one in known), default=(most + 1, ""))
    return found[1] if found[0] <= most else None
