"""Lets megatron-core be imported on a machine without a GPU.

megatron-core uses many packages where they are installed (Transformer Engine, apex, flash_mla, mamba_ssm ...), and goes
on without those that are not. Some are installed and broken: they want a driver, or libraries of another CUDA. What
such a package raises then would end Megatron, which in places expects nothing but ModuleNotFoundError.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from ckptkit.core.errors import words_of

# What a package raises that finds no driver, no GPU or a library of another CUDA.
_WITHOUT_CUDA = (ImportError, OSError, RuntimeError, AssertionError)
# What fails in these is reported as it is.
_OURS = frozenset({"megatron", "torch", "ckptkit", "converters", "quant", "verify"})


class _BrokenIsAbsent(MetaPathFinder):
    """Makes ModuleNotFoundError of what a package raises at import, where that would reach Megatron.

    Inside a package its own modules may raise what they like: it may expect that.
    """

    def __init__(self) -> None:
        self._inside = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders find, with a loader that reports a package that cannot be imported as absent."""
        if fullname.partition(".")[0] in _OURS | sys.stdlib_module_names:
            return None
        # Contexts are nested where one of our modules that import Megatron imports another.
        others = (finder for finder in sys.meta_path if not isinstance(finder, _BrokenIsAbsent))
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is not None and isinstance(spec.loader, Loader):
            self._watch(spec.loader, fullname)
        return spec

    def _watch(self, loader: Loader, name: str) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            self._inside += 1
            try:
                run(module)
            except ModuleNotFoundError:
                raise
            except _WITHOUT_CUDA as error:
                if self._inside > 1:
                    raise
                message = f"{name} is installed and cannot be imported here: {words_of(error, with_class=True)}"
                raise ModuleNotFoundError(message, name=name) from error
            finally:
                self._inside -= 1

        loader.exec_module = exec_module  # type: ignore[method-assign]


@contextmanager
def importing_megatron() -> Iterator[None]:
    """The context to import megatron-core in: an optional package that is broken here counts as not installed."""
    finder = _BrokenIsAbsent()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
