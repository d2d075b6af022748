"""The names of options and settings of a release of each program, which `lab/option_names.py` writes to `names/`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

# Prefixes of the names in a launch of slime or miles.
_PREFIXES = {"slime": "--", "miles": "--", "megatron-lm": "--", "sglang": "--sglang-", "sglang-router": "--"}


@dataclass(frozen=True)
class Names:
    """The names of one release of a program; `switches` take no value."""

    release: str
    valued: frozenset[str]
    switches: frozenset[str]

    @property
    def every(self) -> frozenset[str]:
        return self.valued | self.switches


@cache
def names(program: str) -> Names:
    """The list of a program: `slime`, `miles`, `megatron-lm`, `sglang`, `sglang-router`, `nemo-rl` or `roll`."""
    text = files("ckptkit.verify.launch.options").joinpath(f"names/{program}.txt").read_text()
    release, _, text = text.partition("\n")
    valued, _, switches = text.partition("\n\n")
    return Names(release.removeprefix("# "), frozenset(valued.split()), frozenset(switches.split()))


@cache
def trainer_options() -> Mapping[str, str]:
    """Every option of slime and miles with its dashes, and the release with the option."""
    return {f"{prefix}{name}": release.release for prefix, release in _releases() for name in release.every}


@cache
def trainer_switches() -> frozenset[str]:
    """The options of slime and miles that take no value in any of these programs."""
    valued = {f"{prefix}{name}" for prefix, release in _releases() for name in release.valued}
    return frozenset(f"{prefix}{name}" for prefix, release in _releases() for name in release.switches) - valued


def _releases() -> Iterator[tuple[str, Names]]:
    return ((prefix, names(program)) for program, prefix in _PREFIXES.items())


@cache
def settings(program: str) -> Mapping[str, str]:
    """Every setting of NeMo-RL or ROLL, and the release with the setting."""
    return dict.fromkeys(names(program).valued, names(program).release)


@cache
def engine_settings() -> frozenset[str]:
    """The Python names of SGLang's and Megatron's settings, which NeMo-RL and ROLL pass on."""
    return frozenset(name.replace("-", "_") for program in ("sglang", "megatron-lm") for name in names(program).every)


def edit_distance(first: str, second: str, most: int) -> int:
    """The optimal string alignment distance, which counts swapped neighbours as one edit; at most `most` + 1."""
    if abs(len(first) - len(second)) > most:
        return most + 1
    before: list[int] = []
    last = list(range(len(second) + 1))
    for row, letter in enumerate(first, 1):
        current = [row]
        for column, target in enumerate(second, 1):
            cost = min(last[column] + 1, current[-1] + 1, last[column - 1] + (letter != target))
            if before and column > 1 and letter == second[column - 2] and first[row - 2] == target:
                cost = min(cost, before[column - 2] + 1)
            current.append(cost)
        before, last = last, current
        if min(last) > most and min(before) > most:  # an exchange of neighbours looks back two rows
            return most + 1
    return min(last[-1], most + 1)


def nearest(name: str, known: Iterable[str], most: int) -> str | None:
    """The known name nearest to this one with at most `most` edits, or None."""
    distance, match = min(((edit_distance(name, one, most), one) for one in known), default=(most + 1, ""))
    return match if distance <= most else None
