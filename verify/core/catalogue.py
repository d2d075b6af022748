"""The wording of every check by its code, from `catalogue.toml`: its titles, why it matters, and what to do."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Wording:
    """What holds if a check passes, what is wrong if it fails, why that matters, and what to do about a finding."""

    title: str
    failed: str
    why: str
    fix: str


@cache
def rows() -> Mapping[str, Mapping[str, Any]]:
    """The rows of `catalogue.toml` by code."""
    return tomllib.loads(files(__package__).joinpath("catalogue.toml").read_text(encoding="utf-8"))


def wording_of(code: str, **names: str) -> Wording:
    """The wording of a check; `names` are put into its `{...}`. Raises KeyError for a code without one."""
    row = rows()[code]
    if names:
        row = {key: text.format(**names) for key, text in row.items()}
    return Wording(row["title"], row["failed"], row["why"], row["fix"])


def retired_codes() -> Mapping[str, str]:
    """What to use instead of each check that was taken out, by its code, which is not used again."""
    return {code: row["retired"] for code, row in rows().items() if "retired" in row}
