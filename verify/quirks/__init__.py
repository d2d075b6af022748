"""What releases of SGLang, vLLM, transformers and Megatron are known to do with a checkpoint, as data: `NAME.toml`.

A quirk is a row: id, versions, effect, message, source, added, and `when` it applies. For a release that is
not one of its versions there is none. `tested` are the releases that ckptkit is tested with; a test fails when they
move past a quirk's versions.
"""

from __future__ import annotations

import operator
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

PROGRAMS = ("sglang", "vllm", "transformers", "megatron")
EFFECTS = (
    "default_ok",  # a parameter has a value of the program's own unless the checkpoint gives another
    "unwritten_ok",  # a parameter is allocated, and nothing of the checkpoint belongs in it
    "unset",  # a parameter without a tensor of its own keeps what memory held
    "misorders",  # the program's own steps after loading put a parameter in a wrong order
    "refuses",
    "ignores",
    "reads_otherwise",
    "takes",  # what other releases refuse
    "constant",  # a class begins with a constant where others begin with random numbers
    "clashes",  # another distribution in the same environment breaks it
)
_COMPARED: Mapping[str, Callable[[Any, Any], bool]] = {">=": operator.ge, "<": operator.lt}


@dataclass(frozen=True)
class Quirk:
    """A row; without `when` it is for its caller to know what it is about.

    when: `tensors`, an expression for names of parameters or tensors; `config`, one for the value of each key;
    `package`, a distribution; `fields`, those of a config that are not read, or names that go together.
    """

    id: str
    versions: str  # as `>=0.5.15,<0.6`
    effect: str  # of EFFECTS
    source: str  # where the program has it, or where it was run
    added: str  # a date
    message: str = ""  # the words of a finding
    value: int = 0  # a number that the message is about
    when: Mapping[str, Any] = field(default_factory=dict)

    def is_of(self, release: str) -> bool:
        """Whether a release is one of its `versions`."""
        clauses = re.findall(r"(>=|<)([\d.]+)", self.versions)
        return all(_COMPARED[sign](_numbers(release), _numbers(bound)) for sign, bound in clauses)

    def is_about(self, name: str, config: Mapping[str, Any] | None = None) -> bool:
        """Whether it is about a parameter or tensor of this name, in a model of this config."""
        values = [(str((config or {}).get(key)), pattern) for key, pattern in self.when.get("config", {}).items()]
        return all(re.fullmatch(pattern, text) for text, pattern in [(name, self.when.get("tensors", ".*")), *values])


@dataclass(frozen=True)
class Program:
    """A program: the releases that ckptkit is tested with, and what is known of it."""

    tested: tuple[str, ...]
    quirks: tuple[Quirk, ...]


@cache
def program(name: str) -> Program:
    """The program of this name, one of PROGRAMS."""
    content = tomllib.loads(files("verify.quirks").joinpath(f"{name}.toml").read_text())
    return Program(tuple(content["tested"]), tuple(Quirk(**row) for row in content["quirk"]))


@cache
def quirks(name: str, effect: str | None = None, release: str | None = None) -> tuple[Quirk, ...]:
    """The quirks of a release that have this effect, or any; without a release, those of any tested one."""
    known = program(name)
    releases = known.tested if release is None else (release,)
    return tuple(one for one in known.quirks if effect in (None, one.effect) and any(map(one.is_of, releases)))


def quirk(name: str, quirk_id: str, release: str | None = None) -> Quirk | None:
    """The quirk of this id, or None if the release, or every tested one, is not one of its versions."""
    return next((one for one in quirks(name, release=release) if one.id == quirk_id), None)


@cache
def installed(name: str) -> str | None:
    """The release of the program in this environment, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release.partition("+")[0])]
