"""Reads the pickles inside a checkpoint without running anything that they name.

A pickle may name any callable. Here every name becomes an inert `Record` that only remembers its arguments and its
attributes, so nothing in a file can run code, and a class that is not installed is not an obstacle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptkit.core.dtypes import ITEMSIZE
from ckptkit.formats.torch_save.machine import Machine, NamedLater
from ckptkit.formats.torch_save.records import Dtype, Items, NotAllowed, Record

# How pickles of protocol 2, which torch.save writes, spell modules.
_OLD_NAMES = {"__builtin__": "builtins", "copy_reg": "copyreg"}


def loads(content: bytes, allowed: Callable[[str], bool] | None = None) -> Any:
    """The object pickled in `content`: plain Python values, `torch.Size` as a tuple, dtypes, and Records for the rest.

    `allowed` is which classes and functions (`module.name`) it may name; None: any, since none is run. Raises
    NotAllowed for another, and pickle.UnpicklingError where the pickle is damaged or past the bounds of `Machine`.
    """
    return Machine(content, lambda module, name: _named(module, name, allowed)).run()


def loads_named(content: bytes) -> tuple[Any, frozenset[str]]:
    """`loads` of a pickle that may name anything, and every class and function (`module.name`) that it names.

    Raises NotAllowed where it calls getattr for anything but what lies inside a class.
    """
    names: set[str] = set()

    def allowed(name: str) -> bool:
        names.add(name)
        return True

    return loads(content, allowed), frozenset(names)


def _named(module: str, name: str, allowed: Callable[[str], bool] | None) -> Any:
    """What a name in a pickle becomes."""
    if allowed is not None:
        module = _OLD_NAMES.get(module, module)
        if (module, name) == ("builtins", "getattr"):
            return NamedLater(lambda *arguments: _nested(arguments, allowed))
        if not allowed(f"{module}.{name}"):
            raise NotAllowed(f"{module}.{name}")
    if (module, name) == ("torch", "Size"):
        return tuple
    if module == "torch" and name in ITEMSIZE:
        return Dtype(name)
    if (module, name) == ("collections", "OrderedDict"):
        return Items
    return type(name, (Record,), {"kind": f"{module}.{name}"})


def _nested(arguments: tuple[Any, ...], allowed: Callable[[str], bool]) -> Any:
    """What lies inside a class and is named by a call of getattr: a class by protocol 2, an enum's member by 3.11.2."""
    holder, name = arguments if len(arguments) == 2 else (None, None)
    if not (isinstance(holder, type) and issubclass(holder, Record) and isinstance(name, str)):
        raise NotAllowed("builtins.getattr")
    module, _, outer = holder.kind.rpartition(".")
    return _named(module, f"{outer}.{name}", allowed)
