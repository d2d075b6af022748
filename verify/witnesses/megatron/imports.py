"""Lets megatron-core be imported on a machine without a GPU.

megatron-core uses many packages if they are installed (Transformer Engine, apex, flash_mla, mamba_ssm ...). Some need a
driver, or libraries of another CUDA. Their exceptions would end Megatron, which expects only ModuleNotFoundError.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from ckptkit.core.errors import words_of

# Raised by packages that find no driver, no GPU or a library of another CUDA.
_WITHOUT_CUDA = (ImportError, OSError, RuntimeError, AssertionError)
# Exceptions of these are not changed.
_OURS = frozenset({"megatron", "torch", "ckptkit", "converters", "quant", "verify"})


class _BrokenIsAbsent(MetaPathFinder):
    """Turns exceptions of a package's import into ModuleNotFoundError, unless a module of the package imports it."""

    def __init__(self) -> None:
        self._inside = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the other finders, with a loader that reports a package that cannot be imported as absent."""
        if fullname.partition(".")[0] in _OURS | sys.stdlib_module_names:
            return None
        # Contexts are nested where one of our modules that import Megatron imports another.
        others = (finder for finder in sys.meta_path if not isinstance(finder, _BrokenIsAbsent))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and isinstance(spec.loader, Loader):
            self._convert_errors(spec.loader, fullname)
        return spec

    def _convert_errors(self, loader: Loader, name: str) -> None:
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
                message = f"{name} is installed but cannot be imported: {words_of(error, with_class=True)}"
                raise ModuleNotFoundError(message, name=name) from error
            finally:
                self._inside -= 1

        loader.exec_module = exec_module  # type: ignore[method-assign]


@contextmanager
def importing_megatron() -> Iterator[None]:
    """Treats optional packages that are broken here as not installed while megatron-core is imported."""
    finder = _BrokenIsAbsent()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
