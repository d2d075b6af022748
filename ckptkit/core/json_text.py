"""Reads untrusted JSON, within limits far above those of real checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

MAX_BYTES = 1 << 26  # of a file: the index of a model of 10^12 parameters has about 2 x 10^7
MAX_VALUES = 4_000_000
MAX_DEPTH = 64
MAX_DIGITS = 100  # of an integer: tokenizers have a `model_max_length` of 31

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse(text: bytes, most_values: int = MAX_VALUES) -> Any:
    """Parses JSON. Raises ValueError for invalid text, beyond a limit of this module, for a duplicate key, which
    readers resolve differently, and for half of a surrogate pair, which no encoding can write.
    """
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has {len(text)} bytes, but ckptkit reads at most {MAX_BYTES}")
    if (values := count_values(text)) > most_values:
        raise ValueError(f"it has about {values} values, but ckptkit reads at most {most_values}")
    try:
        value = json.loads(text.decode(), object_pairs_hook=_once, parse_int=_integer)
    except RecursionError as error:
        raise ValueError("its objects are nested too deeply") from error
    _check_depth(value)
    require_characters(text, value)
    return value


def count_values(text: bytes) -> int:
    """Estimates the number of values in JSON before parsing: at least all but one of each list or object."""
    return text.count(b",") + text.count(b":")


def require_characters(text: bytes, value: Any) -> None:
    """Raises ValueError if a string of `value`, parsed from `text`, has half of a surrogate pair."""
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"{json.dumps(repeated_keys(pairs)[0][:80])} occurs twice in one object")
    return found


def repeated_keys(pairs: Sequence[tuple[str, Any]]) -> list[str]:
    """The repeated keys, in order."""
    seen: set[str] = set()
    return [key for key, _ in pairs if key in seen or seen.add(key)]  # type: ignore[func-returns-value]


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it has an integer of {len(digits)} digits")
    return int(digits)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            part
            for one in level
            if isinstance(one, (dict, list))
            for part in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise ValueError(f"its objects are nested more than {MAX_DEPTH} levels deep")
