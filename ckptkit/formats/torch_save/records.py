"""What a pickle's names become: inert values that nothing can run."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

_MAX_DEPTH, _MAX_PARTS = 32, 1_000_000  # of a value; a launch has some hundred arguments

_OWN = frozenset({"args", "kind", "set_state", "state", "__class__"})  # a pickle's state does not replace these


class Record:
    """An inert instance of any class: `args`, and `state` of `__setstate__`, whose keys become attributes."""

    kind = ""
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def set_state(self, state: Any) -> None:
        """Does what unpickling does with an instance's state: a dict, or a pair of one and the values of slots."""
        self.state = state
        for part in state if type(state) is tuple and len(state) == 2 else (state,):
            if isinstance(part, dict):
                # A dict takes any key here; those that are not names are no attributes, and harmless.
                self.__dict__.update(
                    part if _OWN.isdisjoint(part) else {k: v for k, v in part.items() if k not in _OWN}
                )

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def kind_of(value: Any) -> str:
    """The full name that a Record, or a class of them, stands for; of any other value the name of its type."""
    kind = value if isinstance(value, type) else type(value)
    return kind.kind if issubclass(kind, Record) else kind.__name__


@dataclass(frozen=True)
class Dtype:
    """Stands for a torch.dtype, and prints as it does."""

    name: str

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class Items(dict[Any, Any]):
    """An OrderedDict as a plain dict, on which pickles may still set attributes, as a module's state dict has some."""


def is_bounded(value: Any) -> bool:
    """Whether a value has few enough parts to be printed and compared; one that holds itself has not."""
    level, left = [value], _MAX_PARTS
    for _ in range(_MAX_DEPTH):
        level = [part for one in level if isinstance(one, (dict, list, tuple)) for part in _parts(one)]
        left -= len(level)
        if not level or left < 0:
            return left >= 0
    return False


def _parts(value: Any) -> Any:
    return [*value, *value.values()] if isinstance(value, dict) else value


class NotAllowed(pickle.UnpicklingError):
    """A pickle names something that its reader does not allow; `kind` is its full name."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"it names {kind}")
        self.kind = kind
