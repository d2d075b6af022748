"""Which of SGLang's parameters were written while each tensor was loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def place(tensor: Tensor) -> int:
    """Where the storage of a tensor begins: equal for a parameter, its aliases and its views."""
    return tensor.untyped_storage().data_ptr()


class WriteRecord(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, notes which of `owners` (storage -> name) are written for the name that `feed` gave last."""

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
