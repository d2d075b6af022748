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
_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "w4a16": "quant.schemes.w4a16",
        "fp8-block": "quant.schemes.floats",
        "fp8-channel": "quant.schemes.floats",
        "mxfp8": "quant.schemes.floats",
        "mxfp4": "quant.schemes.floats",
        "nvfp4": "quant.schemes.floats",
    }
)
NAMES = tuple(_MODULES)
UNQUANTIZED = "none"  # of `ckptkit quantize`: no scheme, so that a quantized source is dequantized
# Command line options, by their parameters' names, that only the schemes of one module have.
_OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "quant.schemes.w4a16": ("group_size", "grid", "asymmetric", "search", "scale_dtype", "tp"),
        "quant.schemes.floats": ("rounding", "exact"),
    }
)


def options_of_others(name: str) -> tuple[str, ...]:
    """The options that have no effect on the scheme called `name`, or with none."""
    others = tuple(option for module, own in _OPTIONS.items() if module != _MODULES.get(name) for option in own)
    return (*others, "ignore") if name == UNQUANTIZED else others


def scheme_module(name: str) -> SchemeModule:
    """The module of the scheme called `name`."""
    return cast("SchemeModule", import_module(_MODULES[name]))
