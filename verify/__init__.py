"""Proves a checkpoint: checks as data, and real Megatron and real SGLang as witnesses in subprocesses.

`ckptkit.verify(...)` is `ckptkit.verify.run.verify`: the package and the function have one name.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    @property
    def _function(self) -> Any:
        from ckptkit.verify.run import verify

        return verify

    def __call__(self, *paths: Any, **options: Any) -> Any:
        return self._function(*paths, **options)

    __signature__ = property(lambda self: inspect.signature(self._function))

    @property
    def __doc__(self) -> str:  # type: ignore[override] # shown by `help`, which takes this for a package
        return f"{self._function.__doc__}\n\n    verify{self.__signature__}"


sys.modules[__name__].__class__ = _Callable
