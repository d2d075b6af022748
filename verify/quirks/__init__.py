"""What releases of SGLang, vLLM, transformers and Megatron are known to do with a checkpoint, as data: `NAME.toml`.

A quirk is a row, and is none for a release that its versions do not include. A test fails when `tested`, the releases
that ckptkit is tested with, move past a quirk's versions.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Quirk:
    """A row; `sglang.toml` explains the fields."""

    id: str
    versions: str
    effect: str
    source: str
    added: str
    message: str = ""
    value: int = 0
    when: Mapping[str, Any] = field(default_factory=dict)

    def includes(self, release: str) -> bool:
        """Whether a release is one of its `versions`."""
        first, end = re.findall(r"[\d.]+", self.versions)
        return _numbers(first) <= _numbers(release) < _numbers(end)

    def is_about(self, name: str, config: Mapping[str, Any]) -> bool:
        """Whether it is about a parameter or tensor of this name, in a model of this config."""
        values = [(str(config.get(key)), pattern) for key, pattern in self.when.get("config", {}).items()]
        return all(re.fullmatch(pattern, text) for text, pattern in [(name, self.when.get("tensors", ".*")), *values])


@cache
def _table(program: str) -> Mapping[str, Any]:
    return tomllib.loads(files("ckptkit.verify.quirks").joinpath(f"{program}.toml").read_text())


def releases_of(program: str) -> tuple[str, ...]:
    """The releases of a program that ckptkit is tested with, the oldest first."""
    return tuple(_table(program)["tested"])


@cache
def quirks(program: str, effect: str | None = None, release: str | None = None) -> tuple[Quirk, ...]:
    """The quirks of a release that have this effect, or any; without a release, those of any tested one."""
    releases = releases_of(program) if release is None else (release,)
    rows = [Quirk(**row) for row in _table(program)["quirk"]]
    return tuple(row for row in rows if effect in (None, row.effect) and any(map(row.includes, releases)))


def quirk(program: str, quirk_id: str, release: str | None = None) -> Quirk | None:
    """The quirk of this id, or None if the release, or every tested one, is not one of its versions."""
    return next((row for row in quirks(program, release=release) if row.id == quirk_id), None)


@cache
def installed(program: str) -> str | None:
    """The release of a program in this environment, or None."""
    try:
        return version(program)
    except PackageNotFoundError:
        return None


def _numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release.partition("+")[0])]
