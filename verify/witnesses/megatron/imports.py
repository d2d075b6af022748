"""Lets megatron-core be imported on a machine without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch


class _Hidden(MetaPathFinder):
    """Reports some packages as not installed."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises ModuleNotFoundError for a hidden package; leaves every other to the next finder."""
        if fullname.partition(".")[0] in self._packages:
            raise ModuleNotFoundError(f"No module named {fullname!r}: hidden, it needs a GPU", name=fullname)
        return None


@contextmanager
def hidden(packages: Sequence[str]) -> Iterator[None]:
    """Within the context, importing one of these packages raises ModuleNotFoundError, unless it was imported before."""
    finder = _Hidden(packages)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def importing_megatron() -> AbstractContextManager[None]:
    """The context to import megatron-core in.

    megatron-core 0.19 imports `flash_mla` where it is installed, and expects an ImportError where it is not. Without a
    CUDA driver that package raises OSError. Its kernels need a GPU, so without one it is hidden.
    """
    return hidden(() if torch.cuda.is_available() else ("flash_mla",))
