"""The full list of options of each program, by release: data files in `releases/`, one name a line.

A name that not every release of the file's second line has stands with the first and the last that do. The first line
says which files of the program the names were taken from.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.resources import files

# What stands before a name in a launch of slime, miles and vime.
_TRAINERS = {
    "slime": "--",
    "miles": "--",
    "vime": "--",
    "megatron-lm": "--",
    "sglang": "--sglang-",
    "sglang-router": "--",
    "vllm": "--vllm-",
}


@cache
def names(program: str) -> frozenset[str]:
    """Every name that a release of a program has: `slime`, `miles`, `megatron-lm`, `sglang`, `vllm`, `verl` ..."""
    return frozenset(_lines(program))


def _lines(program: str) -> Iterator[str]:
    text = files("verify.launch.options").joinpath(f"releases/{program}.txt").read_text()
    for line in text.splitlines():
        if not line.startswith("#"):
            yield line.partition(" ")[0]


@cache
def trainer_options() -> frozenset[str]:
    """Every option that a launch of slime, miles, vime or Megatron-LM may give, with its dashes."""
    given = (f"{before}{name}" for program, before in _TRAINERS.items() for name in names(program))
    return frozenset(given)


@cache
def engine_settings() -> frozenset[str]:
    """What engines and Megatron call their settings in Python: jobs of verl, NeMo-RL and ROLL hand these on."""
    programs = ("sglang", "vllm", "megatron-lm")
    return frozenset(name.replace("-", "_") for program in programs for name in names(program))
