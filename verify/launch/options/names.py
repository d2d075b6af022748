"""The names of options and settings of a release of each program, as `lab/option_names.py` writes them to `names/`.

And which of them a misspelled one was meant to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

# What stands before a name in a launch of slime or miles.
_PREFIXES = {"slime": "--", "miles": "--", "megatron-lm": "--", "sglang": "--sglang-", "sglang-router": "--"}


@dataclass(frozen=True)
class Names:
    """The names that one release of a program has; `switches` are those that take no value."""

    release: str
    valued: frozenset[str]
    switches: frozenset[str]

    @property
    def every(self) -> frozenset[str]:
        """All of them."""
        return self.valued | self.switches


@cache
def names(program: str) -> Names:
    """The list of a program: `slime`, `miles`, `megatron-lm`, `sglang`, `sglang-router`, `nemo-rl` or `roll`."""
    text = files("ckptkit.verify.launch.options").joinpath(f"names/{program}.txt").read_text()
    release, _, rest = text.partition("\n")
    valued, _, switches = rest.partition("\n\n")
    return Names(release.removeprefix("# "), frozenset(valued.split()), frozenset(switches.split()))


@cache
def trainer_options() -> Mapping[str, str]:
    """Every option that a launch of slime or miles may give, with its dashes, and the release that has it."""
    listed = [(before, names(program)) for program, before in _PREFIXES.items()]
    return {f"{before}{name}": one.release for before, one in listed for name in one.every}


@cache
def trainer_switches() -> frozenset[str]:
    """The options of slime and miles that take no value in any of these programs."""
    listed = [(before, names(program)) for program, before in _PREFIXES.items()]
    valued = {f"{before}{name}" for before, one in listed for name in one.valued}
    return frozenset(f"{before}{name}" for before, one in listed for name in one.switches) - valued


@cache
def settings(program: str) -> Mapping[str, str]:
    """Every setting of NeMo-RL or ROLL, and the release that has it."""
    return dict.fromkeys(names(program).valued, names(program).release)


@cache
def engine_settings() -> frozenset[str]:
    """What SGLang and Megatron call their settings in Python: jobs of NeMo-RL and ROLL hand these on."""
    listed = [names(program) for program in ("sglang", "megatron-lm")]
    return frozenset(name.replace("-", "_") for one in listed for name in one.every)


def edit_distance(one: str, other: str, most: int) -> int:
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
    found = min(((edit_distance(name, one, most), one) for one in known), default=(most + 1, ""))
    return found[1] if found[0] <= most else None
