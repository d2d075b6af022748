"""Inert values for the classes and functions named in a pickle."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

_MAX_DEPTH, _MAX_PARTS = 32, 1_000_000  # of a value; a launch has some hundred arguments
_OWN = frozenset({"args", "kind", "set_state", "state", "__class__"})  # a pickle's state cannot replace these


class Record:
    """An inert instance of any class: `args`, and the `state` of `__setstate__`, with its keys as attributes."""

    kind = ""
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def set_state(self, state: Any) -> None:
        """Stores the state like unpickling does: a dict, or a pair of a dict and the values of slots."""
        self.state = state
        for part in state if type(state) is tuple and len(state) == 2 else (state,):
            if isinstance(part, dict):
                # Keys that are not names do not become attributes, and are harmless.
                own = part if _OWN.isdisjoint(part) else {k: v for k, v in part.items() if k not in _OWN}
                self.__dict__.update(own)

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def kind_of(value: Any) -> str:
    """The full name for a Record or a class of Records; for any other value the name of its type."""
    kind = value if isinstance(value, type) else type(value)
    return kind.kind if issubclass(kind, Record) else kind.__name__


@dataclass(frozen=True)
class Dtype:
    """Represents a torch.dtype, with the same repr."""

    name: str

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class Items(dict[Any, Any]):
    """An OrderedDict as a plain dict; pickles may set attributes on it, like those of a module's state dict."""


def is_bounded(value: Any) -> bool:
    """Whether a value has few enough parts to be printed and compared; false for one that contains itself."""
    level, left = [value], _MAX_PARTS
    for _ in range(_MAX_DEPTH):
        containers = [[*one, *one.values()] if isinstance(one, dict) else one for one in level]
        level = [part for one in containers if isinstance(one, (list, tuple)) for part in one]
        left -= len(level)
        if not level or left < 0:
            return left >= 0
    return False


class NotAllowed(pickle.UnpicklingError):
    """A pickle names a class or function that is not allowed; `kind` is its full name."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"it contains {kind}")
        self.kind = kind
