"""Weights in 8-bit and 4-bit floats with a scale for each block, row or few neighbours, as schemes.

`N.weight` becomes codes under the same name, with its scales beside it in `N.weight_scale_inv` or, as
compressed-tensors writes them, `N.weight_scale`; codes of 4 bits stand two a byte in `N.weight_packed`. Activations are
quantized by the engine while it runs, if at all.
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
from quant.formats.floats.layout import Layout
from quant.formats.floats.table import mxfp4
from quant.formats.part_names import FP8_SCALE, FP8_SCALE_INV
from quant.kernels.float_roundings import blocks_of
from quant.kernels.floats import check_exact, quantize_fp8, quantize_mxfp4
from quant.patterns.entries import check_entries
from quant.schemes.interface import Request
from quant.selection.class_tree import class_tree
from quant.selection.eight_bit import select_eight_bit

if TYPE_CHECKING:
    from torch import Tensor

    from ckptkit.core.checkpoint import Checkpoint
    from quant.kernels.float_roundings import Fp8Weight

_CT = "compressed-tensors"


@dataclass(frozen=True)
class _Kind:
    """One of the schemes."""

    title: str
    block: tuple[int, int | None]  # rows and columns that share a scale; None: a whole row
    roundings: tuple[str, ...]  # the first is the default
    fitted: tuple[int, int]  # what must divide the rows of a layer that engines join of several, and columns
    updates: str | None = None  # the rounding of trainers that update an engine in this format
    layout: Layout | None = None  # how codes of 4 bits and their scales are stored
    unread: str = ""  # what to know where SGLang is a reader


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
        "mxfp4": _Kind(
            "MXFP4",
            (1, 32),
            (_CT,),
            (16, 32),
            layout=mxfp4(packed=True),
            unread="SGLang 0.5.16 does not read MXFP4 of compressed-tensors; vLLM does",
        ),
    }
)


@dataclass(frozen=True)
class FloatScheme:
    """How weights become 8-bit or 4-bit floats, and which modules do not.

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
    """The `Packing` of 8-bit and 4-bit floats."""

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
        if (layout := self.scheme.kind.layout) is not None:
            scales = TensorSpec(spec.name + layout.scales[0], layout.grid(spec.shape), layout.scale_dtypes[0])
            codes = (spec.shape[0], spec.shape[1] // 2)
            return (TensorSpec(spec.name + layout.codes, codes, layout.code_dtypes[0]), scales)
        grid = blocks_of(spec.shape, self.scheme.kind.block)
        ending = FP8_SCALE if self._is_compressed_tensors or self.for_vllm else FP8_SCALE_INV
        dtype = {_CT: spec.dtype, "modelopt": "uint8"}.get(self.scheme.formula, "float32")
        return (TensorSpec(spec.name, spec.shape, "float8_e4m3fn"), TensorSpec(spec.name + ending, grid, dtype))

    def pack(self, spec: TensorSpec, tensors: Sequence[Tensor]) -> list[Tensor]:
        """As `Packing.pack`."""
        scheme, weight = self.scheme, tensors[0].to(self.device)
        packed = _quantize(weight, scheme, spec.name)
        if scheme.exact:
            check_exact(weight, packed, scheme.kind.block, spec.name)
        return [part.cpu() for part in packed]

    def config(self) -> dict[str, Any]:
        """As `Packing.config`."""
        if self._is_compressed_tensors:
            return _compressed_tensors_config(self.scheme, self.ignore)
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


def _quantize(weight: Tensor, scheme: FloatScheme, name: str) -> Fp8Weight:
    if scheme.kind.layout is not None:
        return quantize_mxfp4(weight, scheme.formula, name)
    return quantize_fp8(weight, scheme.kind.block, scheme.formula, name)


def _compressed_tensors_config(scheme: FloatScheme, ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors' own presets FP8_BLOCK, FP8_DYNAMIC and MXFP4A16."""
    four_bit, width = scheme.kind.layout is not None, scheme.kind.block[1]
    form = "mxfp4-pack-quantized" if four_bit else "float-quantized"
    kind = {"num_bits": 4 if four_bit else 8, "type": "float", "symmetric": True}
    activations: dict[str, Any] | None = None
    if four_bit:
        dtypes = dict.fromkeys(("scale_dtype", "zp_dtype"), "torch.uint8")
        weights: dict[str, Any] = kind | {"strategy": "group", "group_size": width} | dtypes
    elif width is None:
        weights = kind | {"strategy": "channel"}
        activations = kind | {"strategy": "token", "dynamic": True}
    else:
        weights = kind | {"strategy": "block", "block_structure": list(scheme.kind.block)}
        activations = kind | {"strategy": "group", "group_size": width, "dynamic": True}
    weights["dynamic"] = False
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": form}
    return {
        "quant_method": _CT,
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }


def select(source: Checkpoint, scheme: FloatScheme, request: Request) -> FloatWeights:
    """Decides what is quantized. `source` has one tensor an expert.

    Raises CkptkitError, before anything is read, as `select_eight_bit` does.
    """
    config = as_stored(source.config, source.specs)
    like = request.like.specs if request.like is not None else None
    require(request.where, [f"{module}.weight" for module in sorted(class_tree(config).packable)], source.specs)
    chosen = select_eight_bit(source.specs, config, scheme.ignore, scheme.kind.fitted, like)
    for_vllm = scheme.name == "mxfp8" and set(request.readers) == {"vllm"}
    unread = [scheme.kind.unread] if scheme.kind.unread and "sglang" in request.readers else []
    return FloatWeights(scheme, chosen.names, chosen.ignore, request.device, (*unread, *chosen.notes), for_vllm)


def quantize_sample(weight: Tensor, scheme: FloatScheme) -> None:
    """As `SchemeModule.quantize_sample`."""
    _quantize(weight, scheme, "a sample")
