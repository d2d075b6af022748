"""Bits of tensors: a poison that shows what a loader never wrote, a record of what it did write, and exact comparison."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# All floats: a NaN that no computation makes. Integers: an unlikely number. A place that a file fills with exactly this is
# told apart by comparing it with the file.
_POISON = {1: 0x7F, 2: 0x7FFD, 4: 0x7FFDBEEF, 8: 0x7FFDBEEF7FFDBEEF}
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same width."""
    return tensor.detach().view(_INTEGER[tensor.element_size()])


def poison(tensors: Iterable[Tensor]) -> None:
    """Fills every element with the poison of its width."""
    for tensor in tensors:
        bits(tensor).fill_(_POISON[tensor.element_size()])


def poisoned(tensor: Tensor) -> Tensor:
    """Which elements hold the poison: bool, of the tensor's shape."""
    return bits(tensor) == _POISON[tensor.element_size()]


def place(tensor: Tensor) -> int:
    """Where the storage of a tensor begins: equal for a parameter, its aliases and its views."""
    return tensor.untyped_storage().data_ptr()


class WriteRecord(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, notes for the name given last by `feed` which of `owners` (place of the storage -> name) are written."""

    def __init__(self, owners: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.landed: dict[str, set[str]] = {}
        self._owners = owners
        self._current: set[str] = set()

    def feed(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Passes weights on. A loader asks for the next one only when it is done with the one before."""
        for name, tensor in weights:
            self._current = self.landed.setdefault(name, set())
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if (
                argument.alias_info
                and argument.alias_info.is_write
                and isinstance(value, Tensor)
                and place(value) in self._owners
            ):
                self._current.add(self._owners[place(value)])
        return func(*args, **(kwargs or {}))


def difference(actual: Tensor, expected: Tensor) -> str | None:
    """None when the two are equal bit for bit; else how they differ, for people."""
    if actual.shape != expected.shape:
        return f"shape {list(actual.shape)} instead of {list(expected.shape)}"
    unequal = bits(actual) != bits(expected)
    count = int(unequal.sum())
    if not count:
        return None
    at = unequal.nonzero()[0].tolist()
    return f"{count} of {actual.numel()} elements differ, first at {at}: {actual[tuple(at)].item()} instead of {expected[tuple(at)].item()}"
