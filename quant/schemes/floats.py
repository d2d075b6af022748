"""FP8 weights (float8_e4m3fn) with a scale for each block, row or 32 neighbours, as schemes.

`N.weight` becomes codes under the same name, with its scales beside it in `N.weight_scale_inv` or, as
compressed-tensors writes them, `N.weight_scale`. Activations are quantized by the engine while it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import require
from ckptkit.core.specs import TensorSpec
from converters.stored import as_stored
from quant.formats.part_names import FP8_SCALE, FP8_SCALE_INV
from quant.kernels.float_roundings import blocks_of
from quant.kernels.floats import check_exact, quantize_fp8
from quant.patterns.entries import check_entries
from quant.schemes.interface import Request
from quant.selection.class_tree import class_tree
from quant.selection.eight_bit import select_eight_bit

if TYPE_CHECKING:
    from torch import Tensor

    from ckptkit.core.checkpoint import Checkpoint

_CT = "compressed-tensors"


@dataclass(frozen=True)
class _Kind:
    """One of the schemes."""

    title: str
    block: tuple[int, int | None]  # rows and columns that share a scale; None: a whole row
    roundings: tuple[str, ...]  # the first is the default
    fitted: tuple[int, int]  # what must divide the rows of a layer that engines join of several, and columns
    updates: str | None = None  # the rounding of trainers that update an engine in this format


_KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        "fp8-block": _Kind(
            "FP8 in blocks",
            (128, 128),
            ("online", "slime", "slime-cuda", "transformers", "deepgemm", _CT),
            (128, 128),
            "online",
        ),
        "fp8-channel": _Kind("FP8 in rows", (1, None), ("slime", "slime-cuda", _CT), (16, 16)),
        "mxfp8": _Kind("MXFP8", (1, 32), ("modelopt",), (1, 32), "modelopt"),
    }
)


@dataclass(frozen=True)
class FloatScheme:
    """How weights become FP8, and which modules do not.

    `rounding` is the writer whose bytes are wanted, of `quant.kernels.float_roundings`; None: the first that the scheme
    has. Raises CkptkitError for a name or a rounding that is not known, and patterns that `check_entries` refuses.
    """

    name: str = "fp8-block"
    rounding: str | None = None
    ignore: tuple[str, ...] = ()  # in the pattern language of compressed-tensors
    exact: bool = False  # a weight that would change is an error

    def __post_init__(self) -> None:
        if self.name not in _KINDS:
            raise CkptkitError(f"unknown scheme {self.name!r}", f"choose one of {', '.join(_KINDS)}")
        known = _KINDS[self.name].roundings
        if self.rounding is not None and self.rounding not in known:
            raise CkptkitError(f"{self.name} is not rounded as {self.rounding!r}", f"choose one of {', '.join(known)}")
        check_entries(self.ignore, "ignore")

    @property
    def kind(self) -> _Kind:
        """What all schemes of this name share."""
        return _KINDS[self.name]

    @property
    def formula(self) -> str:
        """The rounding, also where none was given."""
        return self.rounding or self.kind.roundings[0]

    @property
    def title(self) -> str:
        """The scheme in messages."""
        return self.kind.title

    @property
    def is_slow(self) -> bool:
        """Whether one core does not keep up with a disk: no."""
        return False

    def command_line(self) -> list[str]:
        """The options of `ckptkit quantize` that give this scheme, less its name."""
        words = ["--rounding", self.formula, *(["--exact"] if self.exact else [])]
        return words + [word for pattern in self.ignore for word in ("--ignore", pattern)]

    def check_preset(self) -> None:
        """Raises CkptkitError unless updates of an engine are rounded so (`--preset rl`)."""
        if self.kind.updates is None:
            raise CkptkitError(
                f"--preset rl is not for {self.name}, in which no trainer updates an engine", "quantize to fp8-block"
            )
        if self.formula != self.kind.updates:
            raise CkptkitError(
                f"--preset rl rounds {self.name} as {self.kind.updates}, which is how trainers update an engine",
                "leave out --rounding",
            )


def from_options(name: str, given: dict[str, Any], reference: str | Path | None) -> FloatScheme:
    """As `SchemeModule.from_options`. No checkpoint says how it was rounded."""
    return FloatScheme(name, given.pop("rounding"), given.pop("ignore"), given.pop("exact"))


@dataclass(frozen=True)
class FloatWeights:
    """The `Packing` of FP8."""

    scheme: FloatScheme
    names: Collection[str]
    ignore: tuple[str, ...]  # whole names of modules that are not quantized
    device: str = "cpu"
    notes: tuple[str, ...] = ()
    # Whether MXFP8 is spelled as vLLM's class of ModelOpt's format reads it.
    for_vllm: bool = False

    @property
    def label(self) -> str:
        """As `Packing.label`."""
        return f"quantize {self.scheme.name}"

    def shapes(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """As `Packing.shapes`."""
        grid = blocks_of(spec.shape, self.scheme.kind.block)
        ending = FP8_SCALE if self._is_compressed_tensors or self.for_vllm else FP8_SCALE_INV
        dtype = {_CT: spec.dtype, "modelopt": "uint8"}.get(self.scheme.formula, "float32")
        return (TensorSpec(spec.name, spec.shape, "float8_e4m3fn"), TensorSpec(spec.name + ending, grid, dtype))

    def pack(self, spec: TensorSpec, tensors: Sequence[Tensor]) -> list[Tensor]:
        """As `Packing.pack`."""
        scheme, weight = self.scheme, tensors[0].to(self.device)
        packed = quantize_fp8(weight, scheme.kind.block, scheme.formula, spec.name)
        if scheme.exact:
            check_exact(weight, packed, scheme.kind.block, spec.name)
        return [part.cpu() for part in packed]

    def config(self) -> dict[str, Any]:
        """As `Packing.config`."""
        if self._is_compressed_tensors:
            return _compressed_tensors_config(self.scheme.kind.block, self.ignore)
        powers = self.scheme.formula in ("deepgemm", "modelopt")
        return {
            "quant_method": "mxfp8" if self.scheme.name == "mxfp8" else "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(self.scheme.kind.block),
            **({"scale_fmt": "ue8m0"} if powers else {}),
            "ignored_layers" if self.for_vllm else "modules_to_not_convert": list(self.ignore),
        }

    @property
    def _is_compressed_tensors(self) -> bool:
        return self.scheme.formula == _CT or self.scheme.name == "fp8-channel"


def _compressed_tensors_config(block: tuple[int, int | None], ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors' own presets FP8_BLOCK and FP8_DYNAMIC."""
    kind = {"num_bits": 8, "type": "float", "symmetric": True}
    if block[1] is None:
        weights: dict[str, Any] = kind | {"strategy": "channel", "dynamic": False}
        activations: dict[str, Any] = kind | {"strategy": "token", "dynamic": True}
    else:
        weights = kind | {"strategy": "block", "block_structure": list(block), "dynamic": False}
        activations = kind | {"strategy": "group", "group_size": block[1], "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": "float-quantized"}
    return {
        "quant_method": _CT,
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def select(source: Checkpoint, scheme: FloatScheme, request: Request) -> FloatWeights:
    """Decides what becomes FP8. `source` has one tensor an expert.

    Raises CkptkitError, before anything is read, as `select_eight_bit` does.
    """
    config = as_stored(source.config, source.specs)
    like = request.like.specs if request.like is not None else None
    require(request.where, [f"{module}.weight" for module in sorted(class_tree(config).packable)], source.specs)
    chosen = select_eight_bit(source.specs, config, scheme.ignore, scheme.kind.fitted, like)
    for_vllm = scheme.name == "mxfp8" and set(request.readers) == {"vllm"}
    return FloatWeights(scheme, chosen.names, chosen.ignore, request.device, chosen.notes, for_vllm)


def quantize_sample(weight: Tensor, scheme: FloatScheme) -> None:
    """As `SchemeModule.quantize_sample`."""
    quantize_fp8(weight, scheme.kind.block, scheme.formula, "a sample")
