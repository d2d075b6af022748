"""Reads values of an HF config, under every spelling that transformers v4 and v5 use, and refuses what is no value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ckptkit.errors import CkptkitError

_REQUIRED: Any = object()


def integer(config: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> int:
    """A whole number of the config; absent and null mean `default`. Raises CkptkitError naming the key."""
    value = _value(config, key, default)
    if type(value) is not int:
        raise _wrong(key, value, "a whole number")
    return value


def number(config: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> float:
    """A finite number of the config; absent and null mean `default`. Raises CkptkitError naming the key."""
    value = _value(config, key, default)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _wrong(key, value, "a finite number")
    return float(value)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """A switch of the config; absent and null mean `default`. Raises CkptkitError naming the key."""
    value = _value(config, key, default)
    if type(value) is not bool:
        raise _wrong(key, value, "true or false")
    return value


def _value(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key)
    if value is None and default is _REQUIRED:
        raise CkptkitError(f"config.json has no {key!r}", f"a {config.get('model_type')} config must state it; compare with the release")
    return default if value is None else value


def _wrong(key: str, value: Any, what: str) -> CkptkitError:
    return CkptkitError(f"config.json: {key} is {value!r}, not {what}", "compare it with the release")


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings under either spelling: `rope_parameters` (transformers v5) or `rope_theta` and `rope_scaling` (v4).

    Raises CkptkitError when both are there and disagree on theta: readers of v4 and v5 would then run different models.
    """
    v5, v4 = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for key, value in (("rope_parameters", v5), ("rope_scaling", v4)):
        if not isinstance(value, dict):
            raise _wrong(key, value, "an object")
    theta4, theta5 = config.get("rope_theta"), v5.get("rope_theta")
    if theta4 is not None and theta5 is not None and number(config, "rope_theta") != number(v5, "rope_theta"):
        raise CkptkitError(
            f"config.json: rope_theta is {theta4} but rope_parameters says {theta5}",
            "transformers v4 reads the first and v5 the second; make them equal",
        )
    rope = {**v4, **v5}
    rope["rope_theta"] = number(v5, "rope_theta", number(config, "rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    return rope
