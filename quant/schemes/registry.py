"""The schemes of quantization by name. Imports no torch: a scheme's module is loaded when it is used.

Reading its weights back is a `Format` of `ckptkit.quant.formats`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.quant.schemes.interface import Request

if TYPE_CHECKING:
    from torch import Tensor

    from ckptkit.quant.formats.scheme import QuantScheme
    from ckptkit.quant.schemes.floats import FloatScheme, FloatWeights
    from ckptkit.quant.schemes.w4a16 import PackedWeights

# What a user asks for, as data; the constructor refuses contradictions.
Scheme: TypeAlias = "QuantScheme | FloatScheme"
# Which weights of one checkpoint become quantized, and into what.
Packing: TypeAlias = "PackedWeights | FloatWeights"


class SchemeModule(Protocol):
    """What a module of `ckptkit.quant.schemes` has."""

    def from_options(self, name: str, given: dict[str, Any], reference: str | Path | None) -> Scheme:
        """Makes the scheme called `name` of command line options, which it takes out of `given`.

        Options not given default to those of the checkpoint at `reference`. Raises CkptkitError.
        """

    def select(self, source: Checkpoint, scheme: Scheme, request: Request) -> Packing:
        """Decides from headers what is quantized. Raises CkptkitError where readers would disagree about it."""

    def quantize_sample(self, weight: Tensor, scheme: Scheme) -> None:
        """Quantizes a matrix, so that a forecast can measure how long it takes."""


DEFAULT = "w4a16"  # of `ckptkit quantize`
# By the name that `--quantize` takes.
_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "w4a16": "ckptkit.quant.schemes.w4a16",
        "fp8-block": "ckptkit.quant.schemes.floats",
        "fp8-channel": "ckptkit.quant.schemes.floats",
        "mxfp8": "ckptkit.quant.schemes.floats",
        "mxfp4": "ckptkit.quant.schemes.floats",
        "nvfp4": "ckptkit.quant.schemes.floats",
    }
)
NAMES = tuple(_MODULES)
UNQUANTIZED = "none"  # of `ckptkit quantize`: no scheme, so that a quantized source is dequantized
# Command line options, by their parameters' names, that only the schemes of one module have.
_OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "ckptkit.quant.schemes.w4a16": ("group_size", "grid", "asymmetric", "search", "scale_dtype", "tp"),
        "ckptkit.quant.schemes.floats": ("rounding", "exact"),
    }
)


def options_of_others(name: str) -> tuple[str, ...]:
    """The options that have no effect on the scheme called `name`, or with none."""
    others = tuple(option for module, own in _OPTIONS.items() if module != _MODULES.get(name) for option in own)
    return (*others, "ignore") if name == UNQUANTIZED else others


def scheme_module(name: str) -> SchemeModule:
    """The module of the scheme called `name`."""
    return cast("SchemeModule", import_module(_MODULES[name]))
