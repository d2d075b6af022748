"""Reads the wording of every check from `catalogue.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Wording:
    """The texts of a check: titles for a pass and for a failure, rationale and fix."""

    title: str
    failed: str
    why: str
    fix: str


@cache
def rows() -> Mapping[str, Mapping[str, Any]]:
    """The rows of `catalogue.toml` by code."""
    return tomllib.loads(files(__package__).joinpath("catalogue.toml").read_text(encoding="utf-8"))


def wording_of(code: str, **names: str) -> Wording:
    """The wording of a check, with `{...}` replaced by `names`. Raises KeyError for an unknown code."""
    row = rows()[code]
    if names:
        row = {key: text.format(**names) for key, text in row.items()}
    return Wording(row["title"], row["failed"], row["why"], row["fix"])


def retired_codes() -> Mapping[str, str]:
    """The replacement of each retired check, by its code."""
    return {code: row["retired"] for code, row in rows().items() if "retired" in row}
