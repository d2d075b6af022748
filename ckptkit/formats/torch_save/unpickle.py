"""Reads the pickles inside a checkpoint without running anything that they name.

A pickle may name any callable. Here every name becomes an inert `Record` that only remembers its arguments and its
attributes, so nothing in a file can run code, and a class that is not installed is no obstacle.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from ckptkit.core.dtypes import ITEMSIZE

# How pickles of protocol 2, which torch.save writes, spell modules.
_OLD_NAMES = {"__builtin__": "builtins", "copy_reg": "copyreg"}


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


class NotAllowed(pickle.UnpicklingError):
    """A pickle names something that its reader does not allow; `kind` is its full name."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"it names {kind}")
        self.kind = kind


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


class StrictUnpickler(Unpickler):
    """Raises NotAllowed for a name that `allowed` does not grant; a granted one becomes what it is for `Unpickler`."""

    def __init__(self, file: IO[bytes], allowed: Callable[[str], bool]) -> None:
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        module = _OLD_NAMES.get(module, module)
        kind = f"{module}.{name}"
        if kind == "builtins.getattr":
            return self._nested
        if not self._allowed(kind):
            raise NotAllowed(kind)
        return super().find_class(module, name)

    def _nested(self, holder: Any, name: Any) -> Any:
        """A class inside a class, which pickles of protocol 2 name by a call of getattr."""
        if not (isinstance(holder, type) and issubclass(holder, Record) and isinstance(name, str)):
            raise NotAllowed("builtins.getattr")
        module, _, outer = holder.kind.rpartition(".")
        return self.find_class(module, f"{outer}.{name}")


def load(file: IO[bytes], allowed: Callable[[str], bool] | None = None) -> Any:
    """The object pickled in `file`, with Records for all but plain data.

    Raises pickle.UnpicklingError when damaged, and NotAllowed for a name that `allowed`, where given, does not grant.
    """
    try:
        return (StrictUnpickler(file, allowed) if allowed else Unpickler(file)).load()
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


def loads(content: bytes, allowed: Callable[[str], bool] | None = None) -> Any:
    """`load` from bytes."""
    return load(io.BytesIO(content), allowed)
