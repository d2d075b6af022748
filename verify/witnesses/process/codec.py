"""Writes dataclasses as JSON files and reads them back: the jobs and reports that processes exchange."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
_PLAIN = (bool, int, float, str, Any)
_hints = cache(get_type_hints)


def save(value: Any, path: Path) -> None:
    """Writes a dataclass as JSON atomically. Paths become text."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(asdict(value), default=os.fspath))
    part.rename(path)


def load_record(kind: type[T], path: Path) -> T:
    """Reads the dataclass of type `kind` that `save` wrote."""
    record: T = decoded(kind, json.loads(path.read_text()))
    return record


def decoded(kind: Any, value: Any) -> Any:
    """The value of type `kind` for its JSON; of a union only `X | None` is decoded."""
    if NoneType in get_args(kind):
        kinds = [one for one in get_args(kind) if one is not NoneType]
        kind = kinds[0] if len(kinds) == 1 else Any
    if value is None or kind in _PLAIN:
        return value
    if kind is Path:
        return Path(value)
    if is_dataclass(kind):
        hints: Mapping[str, Any] = _hints(kind)  # type: ignore[arg-type]
        return kind(**{name: decoded(hints[name], one) for name, one in value.items()})  # type: ignore[operator]
    if hasattr(kind, "_fields"):
        return kind(*map(decoded, _hints(kind).values(), value))
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        items = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(map(decoded, items, value))
    if origin is Sequence and arguments[0] not in _PLAIN:
        return [decoded(arguments[0], one) for one in value]
    if origin is Mapping and arguments[1] not in _PLAIN:
        return {name: decoded(arguments[1], one) for name, one in value.items()}
    return value
