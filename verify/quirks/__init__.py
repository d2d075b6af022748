"""Reads the known behaviours of releases of SGLang, vLLM, transformers and Megatron from `NAME.toml`.

A quirk is a row, and applies to the releases in its `versions` only. A test fails if these
include no `tested` release.
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
    """One row; `sglang.toml` explains the fields."""

    id: str
    versions: str
    effect: str
    source: str
    added: str
    message: str = ""
    value: int = 0
    when: Mapping[str, Any] = field(default_factory=dict)

    def includes(self, release: str) -> bool:
        """Whether `versions` include this release."""
        first, end = re.findall(r"[\d.]+", self.versions)
        return _numbers(first) <= _numbers(release) < _numbers(end)

    def is_about(self, name: str, config: Mapping[str, Any]) -> bool:
        """Whether the quirk affects a parameter or tensor of this name, in a model of this config."""
        values = [(str(config.get(key)), pattern) for key, pattern in self.when.get("config", {}).items()]
        return all(re.fullmatch(pattern, text) for text, pattern in [(name, self.when.get("tensors", ".*")), *values])


@cache
def _table(program: str) -> Mapping[str, Any]:
    return tomllib.loads(files("ckptkit.verify.quirks").joinpath(f"{program}.toml").read_text())


def releases_of(program: str) -> tuple[str, ...]:
    """The tested releases of a program, oldest first."""
    return tuple(_table(program)["tested"])


@cache
def quirks(program: str, effect: str | None = None, release: str | None = None) -> tuple[Quirk, ...]:
    """The quirks with this effect (or any) of a release, or of all tested ones."""
    releases = releases_of(program) if release is None else (release,)
    rows = [Quirk(**row) for row in _table(program)["quirk"]]
    return tuple(row for row in rows if effect in (None, row.effect) and any(map(row.includes, releases)))


def quirk(program: str, quirk_id: str, release: str | None = None) -> Quirk | None:
    """The quirk of this id, or None if it does not apply to the release, or to any tested one."""
    return next((row for row in quirks(program, release=release) if row.id == quirk_id), None)


@cache
def installed(program: str) -> str | None:
    """The installed release of a program, or None."""
    try:
        return version(program)
    except PackageNotFoundError:
        return None


def _numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release.partition("+")[0])]
