"""The schemes of quantization by name, and what is asked of them. Imports no torch: a scheme is loaded when used.

Reading its weights back is a `Format` of `quant.formats`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, cast

from ckptkit.core.checkpoint import Checkpoint
from quant.selection.readers import ALL_READERS

if TYPE_CHECKING:
    from torch import Tensor

    from quant.formats.scheme import QuantScheme
    from quant.schemes.floats import FloatScheme, FloatWeights
    from quant.schemes.w4a16 import PackedWeights

# What a user asks for, as data; the constructor refuses contradictions.
Scheme: TypeAlias = "QuantScheme | FloatScheme"
# Which weights of one checkpoint become quantized, and into what.
Packing: TypeAlias = "PackedWeights | FloatWeights"


@dataclass(frozen=True)
class Request:
    """What is asked for one checkpoint beside the scheme."""

    # The source as messages name it.
    where: str
    # A quantized checkpoint of the same model: what it has packed is packed, with its scales where they still fit.
    like: Checkpoint | None = None
    # The source as it is stored, where it is quantized itself; used as `like` is, less what `ignore` names.
    stored: Checkpoint | None = None
    # "rl" packs routed experts alone, which both SGLang and vLLM can be updated with.
    preset: Literal["rl"] | None = None
    # Those of `quant.selection.readers.READERS` who must agree on what is packed.
    readers: Sequence[str] = ALL_READERS
    # A tensor parallel size that the kernels of SGLang must be able to load.
    tp: int | None = None
    # What quantizes, "cpu" or "cuda"; the bytes are the same.
    device: str = "cpu"


class SchemeModule(Protocol):
    """What a module of `quant.schemes` has."""

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


class SquaredError(NamedTuple):
    """Sums over weights: the squares of what packing changed, and those of the weights themselves."""

    error: float
    weights: float

    @classmethod
    def total(cls, parts: Iterable[SquaredError]) -> SquaredError:
        """The sums over several matrices."""
        found = list(parts)
        return cls(sum(one.error for one in found), sum(one.weights for one in found))

    @property
    def relative(self) -> float | None:
        """The Frobenius norm of the change, as a share of that of the weights; 0 where all are zeros.

        None where a square is beyond float32: of weights of more than 1e19.
        """
        if not math.isfinite(self.error + self.weights):
            return None
        return math.sqrt(self.error / self.weights) if self.weights else 0.0
