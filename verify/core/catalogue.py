"""Reads the wording of every check from `catalogue.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def rows() -> Mapping[str, Mapping[str, Any]]:
    """The rows of `catalogue.toml` by code."""
    return tomllib.loads(files(__package__).joinpath("catalogue.toml").read_text(encoding="utf-8"))


def wording_of(code: str, **names: str) -> Mapping[str, str]:
    """The row of a check, with `{...}` in its texts replaced by `names`. Raises KeyError for an unknown code."""
    row = rows()[code]
    return {key: text.format(**names) for key, text in row.items()} if names else row


def retired_codes() -> Mapping[str, str]:
    """The replacement of each retired check, by its code."""
    return {code: row["retired"] for code, row in rows().items() if "retired" in row}
