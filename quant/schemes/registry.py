"""Names the schemes. Imports no torch: a scheme's module is loaded when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from quant.schemes.interface import SchemeModule

DEFAULT = "w4a16"  # of `ckptkit quantize`
# By the name that `--quantize` takes.
_MODULES: Mapping[str, str] = MappingProxyType({"w4a16": "quant.schemes.w4a16"})
NAMES = tuple(_MODULES)


def scheme_module(name: str) -> SchemeModule:
    """The module of the scheme called `name`."""
    return cast("SchemeModule", import_module(_MODULES[name]))
