"""Proves a checkpoint: checks as data, and real Megatron and real SGLang as witnesses in subprocesses.

`ckptkit.verify(...)` is `ckptkit.verify.run.verify`: the package and the function have one name.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *paths: Any, **options: Any) -> Any:
        from ckptkit.verify.run import verify

        return verify(*paths, **options)


sys.modules[__name__].__class__ = _Callable
