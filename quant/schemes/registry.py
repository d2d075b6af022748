"""The quantization schemes by name. Imports no torch: the module of a scheme is loaded on use."""

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

Scheme: TypeAlias = "QuantScheme | FloatScheme"  # the options of a user; the constructor refuses contradictions
Packing: TypeAlias = "PackedWeights | FloatWeights"  # the selected weights of one checkpoint, and their new format


class SchemeModule(Protocol):
    """A module of `ckptkit.quant.schemes`."""

    def from_options(self, name: str, given: dict[str, Any], reference: str | Path | None) -> Scheme:
        """Takes the options of a scheme out of `given`; defaults are those of `reference`. Raises CkptkitError."""

    def select(self, source: Checkpoint, scheme: Scheme, request: Request) -> Packing:
        """Selects the weights to quantize, by headers. Raises CkptkitError if readers would disagree about them."""

    def quantize_sample(self, weight: Tensor, scheme: Scheme) -> None:
        """Quantizes a matrix, so that a forecast can measure the time."""


DEFAULT = "w4a16"  # of `ckptkit quantize`
_W4A16, _FLOATS = "ckptkit.quant.schemes.w4a16", "ckptkit.quant.schemes.floats"
_FLOAT_NAMES = ("fp8-block", "fp8-channel", "mxfp8", "mxfp4", "nvfp4")
_MODULES: Mapping[str, str] = MappingProxyType({"w4a16": _W4A16, **dict.fromkeys(_FLOAT_NAMES, _FLOATS)})
NAMES = tuple(_MODULES)  # the values of `--quantize`
UNQUANTIZED = "none"  # of `ckptkit quantize`: no scheme, so that a quantized source is dequantized
# Command line options, by their parameters' names, that only the schemes of one module have.
_OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {_W4A16: ("group_size", "grid", "asymmetric", "search", "scale_dtype", "tp"), _FLOATS: ("rounding", "exact")}
)


def options_of_others(name: str) -> tuple[str, ...]:
    """The options that have no effect on the scheme called `name`, or with none."""
    others = tuple(option for module, own in _OPTIONS.items() if module != _MODULES.get(name) for option in own)
    return (*others, "ignore") if name == UNQUANTIZED else others


def scheme_module(name: str) -> SchemeModule:
    """The module of the scheme called `name`."""
    return cast("SchemeModule", import_module(_MODULES[name]))
