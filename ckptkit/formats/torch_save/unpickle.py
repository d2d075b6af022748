"""Reads the pickles inside a checkpoint without running anything that they name.

A pickle may name any callable. Here every name becomes an inert `Record` that only remembers its arguments and its
attributes, so nothing in a file can run code, and a class that is not installed is no obstacle.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import IO, Any

from ckptkit.core.dtypes import ITEMSIZE


class Record:
    """Stands for an instance of any class: `args` are what it was built with, `state` what `__setstate__` got.

    Where the state is a dict, as it is for most classes, its items are attributes.
    """

    kind = ""
    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in parts:
            if isinstance(part, dict):
                # A dict takes any key here; those that are no names are no attributes, and harmless.
                self.__dict__.update(part)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Items of a dict subclass are of no interest."""

    def append(self, value: Any) -> None:
        """Items of a list subclass are of no interest."""

    def extend(self, values: Any) -> None:
        """Items of a list subclass are of no interest."""

    def __repr__(self) -> str:
        return f"<{self.kind}>"


@dataclass(frozen=True)
class Dtype:
    """Stands for a torch.dtype, and prints as it does."""

    name: str

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class Items(dict[Any, Any]):
    """An OrderedDict as a plain dict, on which pickles may still set attributes, as a module's state dict has some."""


class Unpickler(pickle.Unpickler):
    """Knows plain Python values, `torch.Size` and dtypes; everything else becomes a `Record`."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in ITEMSIZE:
            return Dtype(name)
        if (module, name) == ("collections", "OrderedDict"):
            return Items
        return type(name, (Record,), {"kind": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        """A storage inside a torch.save file: its description, never its bytes."""
        return pid


def load(file: IO[bytes]) -> Any:
    """The object pickled in `file`, with Records for all but plain data. Raises pickle.UnpicklingError when damaged."""
    try:
        return Unpickler(file).load()
    except (
        EOFError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        MemoryError,
        RecursionError,
    ) as error:
        raise pickle.UnpicklingError(str(error)) from error


def loads(content: bytes) -> Any:
    """`load` from bytes."""
    return load(io.BytesIO(content))
