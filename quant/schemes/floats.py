"""Schemes of 8-bit and 4-bit floats with a scale for each block, row or few neighbours.

`N.weight` becomes codes under the same name, with scales in `N.weight_scale_inv` or, in compressed-tensors and
ModelOpt, `N.weight_scale`; 4-bit codes are stored two a byte, for compressed-tensors in `N.weight_packed`. The engine
quantizes activations while it runs, if at all.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from ckptkit.converters.stored import adapt_config
from ckptkit.core.errors import CkptkitError
from ckptkit.core.plan import require
from ckptkit.core.specs import TensorSpec
from ckptkit.quant.engines.registry import engine_class
from ckptkit.quant.formats.floats.layout import Layout, compressed_nvfp4, modelopt_nvfp4, mxfp4
from ckptkit.quant.formats.part_names import FP8_SCALE, FP8_SCALE_INV
from ckptkit.quant.ignore import tiles
from ckptkit.quant.ignore.select import select_float_weights, sharing_a_scale
from ckptkit.quant.ignore.tree import class_tree
from ckptkit.quant.kernels.float_roundings import Fp8Weight, blocks_of
from ckptkit.quant.kernels.floats import check_exact, quantize_fp8, quantize_mxfp4, quantize_nvfp4
from ckptkit.quant.kernels.rounding_error import float_error
from ckptkit.quant.patterns import check_entries
from ckptkit.quant.schemes.interface import Request, SquaredError

if TYPE_CHECKING:
    from torch import Tensor

    from ckptkit.core.checkpoint import Checkpoint

_CT = "compressed-tensors"
# Engines build it from five parts. Blocks must divide each, and one is a number a head.
_MIXER = (".mixer.in_proj", ".mamba.in_proj")
_ENGINES = {"sglang": "SGLang 0.5.16", "vllm": "vLLM 0.26"}
_NOT_LOADED = (
    "SGLang 0.5.16 does not load Qwen2.5-VL and Qwen3-VL in NVFP4, and builds the draft layers of Qwen3.5 unquantized "
    r"(exclude those: --ignore 're:mtp\..*')"
)


@dataclass(frozen=True)
class _Kind:
    """One of the schemes."""

    title: str
    block: tuple[int, int | None]  # rows and columns that share a scale, or None for a complete row
    roundings: tuple[str, ...]  # the first is the default
    fitted: tuple[int, int]  # divisors of the rows of each part of a fused layer, and of columns
    updates: str | None = None  # the rounding of trainers that update an engine in this format
    layouts: tuple[Layout, ...] = ()  # of 4-bit codes and their scales, by rounding
    kept: tuple[str, ...] = ()  # endings of modules that engines hold in BF16 only in this format


_BLOCK_ROUNDINGS = ("online", "slime", "slime-cuda", "transformers", "deepgemm", _CT)
_NVFP4_LAYOUTS = (modelopt_nvfp4(static=False), compressed_nvfp4(static=False))
# SGLang computes with halves of the first. It has a scale for each part of the others, and fills only one.
_NVFP4_KEPT = (".kv_b_proj", ".in_proj_qkvz", *_MIXER)
_KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        "fp8-block": _Kind("FP8 in blocks", (128, 128), _BLOCK_ROUNDINGS, (128, 128), "online", kept=_MIXER),
        "fp8-channel": _Kind("FP8 in rows", (1, None), ("slime", "slime-cuda", _CT), (16, 16)),
        "mxfp8": _Kind("MXFP8", (1, 32), ("modelopt",), (1, 32), "modelopt"),
        "mxfp4": _Kind("MXFP4", (1, 32), (_CT,), (16, 32), layouts=(mxfp4(packed=True),)),
        "nvfp4": _Kind("NVFP4", (1, 16), ("modelopt", _CT), (16, 16), layouts=_NVFP4_LAYOUTS, kept=_NVFP4_KEPT),
    }
)


@dataclass(frozen=True)
class FloatScheme:
    """How weights become floats. Raises CkptkitError for an unknown name or rounding, and as `check_entries`."""

    is_slow: ClassVar[bool] = False  # whether one core is slower than a disk
    name: str = "fp8-block"
    rounding: str | None = None  # a writer in `ckptkit.quant.kernels.float_roundings`, or None for the scheme's first
    ignore: tuple[str, ...] = ()  # in the pattern language of compressed-tensors
    exact: bool = False  # a weight that would change is an error

    def __post_init__(self) -> None:
        if self.name not in _KINDS:
            raise CkptkitError(f"unknown scheme {self.name!r}", f"choose one of {', '.join(_KINDS)}")
        known = _KINDS[self.name].roundings
        if self.rounding is not None and self.rounding not in known:
            raise CkptkitError(f"{self.name} has no rounding {self.rounding!r}", f"choose one of {', '.join(known)}")
        check_entries(self.ignore, "ignore")

    @property
    def kind(self) -> _Kind:
        return _KINDS[self.name]

    @property
    def formula(self) -> str:
        """The given rounding or the default."""
        return self.rounding or self.kind.roundings[0]

    @property
    def layout(self) -> Layout | None:
        """The layout of 4-bit codes, or None for 8-bit ones."""
        return self.kind.layouts[self.kind.roundings.index(self.formula)] if self.kind.layouts else None

    @property
    def title(self) -> str:
        """The scheme in messages."""
        return self.kind.title

    def command_line(self) -> list[str]:
        """The options of `ckptkit quantize` that give this scheme, without its name."""
        words = ["--rounding", self.formula, *(["--exact"] if self.exact else [])]
        return words + [word for pattern in self.ignore for word in ("--ignore", pattern)]

    def check_preset(self) -> None:
        """Raises CkptkitError unless trainers round updates of an engine in this way (`--preset rl`)."""
        if self.kind.updates is None:
            message = f"--preset rl does not support {self.name}: no trainer updates engines in this scheme"
            raise CkptkitError(message, "pass --scheme fp8-block")
        if self.formula != self.kind.updates:
            message = f"--preset rl rounds {self.name} as {self.kind.updates}, which is how trainers update an engine"
            raise CkptkitError(message, "remove --rounding")


def from_options(name: str, given: dict[str, Any], reference: str | Path | None) -> FloatScheme:
    """As `SchemeModule.from_options`. No checkpoint records its rounding."""
    return FloatScheme(name, given.pop("rounding"), given.pop("ignore"), given.pop("exact"))


@dataclass(frozen=True)
class FloatWeights:
    """The selected weights of one checkpoint, and how they become 8-bit and 4-bit floats."""

    scheme: FloatScheme
    names: Collection[str]
    ignore: tuple[str, ...]  # full names of modules that are not quantized
    device: str = "cpu"
    notes: tuple[str, ...] = ()  # limits of engines that serve the result
    together: tuple[tuple[str, ...], ...] = ()  # weights quantized in one step, since they share a scale
    quantized: tuple[str, ...] = ()  # modules by every name that an engine looks up
    for_vllm: bool = False  # MXFP8 has the names that vLLM's class of ModelOpt's format reads
    advice: str | None = None  # options with a smaller error, if any
    errors: dict[str, SquaredError] = field(default_factory=dict)  # of packed weights, by the name of their codes

    @property
    def label(self) -> str:
        """The operation on a weight, for the dry run."""
        return f"quantize {self.scheme.name}"

    def shapes(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The tensors of a quantized weight."""
        if (layout := self.scheme.layout) is not None:
            codes = TensorSpec(spec.name + layout.codes, (spec.shape[0], spec.shape[1] // 2), layout.code_dtypes[0])
            scales = TensorSpec(spec.name + layout.scales[0], layout.grid(spec.shape), layout.scale_dtypes[0])
            second = TensorSpec(spec.name + layout.second, (1,) if layout.divides else (), "float32")
            return (codes, scales, second) if layout.second else (codes, scales)
        grid = blocks_of(spec.shape, self.scheme.kind.block)
        ending = FP8_SCALE if self._is_compressed_tensors or self.for_vllm else FP8_SCALE_INV
        dtype = {_CT: spec.dtype, "modelopt": "uint8"}.get(self.scheme.formula, "float32")
        return (TensorSpec(spec.name, spec.shape, "float8_e4m3fn"), TensorSpec(spec.name + ending, grid, dtype))

    def pack(self, specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Quantizes the weights of one step to tensors as in `shapes`, one weight after the other."""
        scheme, names = self.scheme, [spec.name for spec in specs]
        weights = [tensor.to(self.device) for tensor in tensors]
        packed, second = _quantize(weights, scheme, names)
        ending = "" if scheme.layout is None else scheme.layout.codes
        for weight, tensor, (codes, scales), name in zip(weights, tensors, packed, names, strict=True):
            if second is not None and scheme.layout is not None:
                scales = scales.float() / second if scheme.layout.divides else scales.float() * second
            if scheme.exact:
                check_exact(weight, Fp8Weight(codes, scales), scheme.kind.block, name)
            on_cpu = Fp8Weight(codes.cpu(), scales.cpu())
            self.errors[name + ending] = float_error(tensor, on_cpu, scheme.kind.block)
        shared = [] if second is None else [second]
        return [part.cpu() for one in packed for part in (*one, *shared)]

    def config(self) -> dict[str, Any]:
        """The `quantization_config` of the result."""
        if self.scheme.name == "nvfp4" and not self._is_compressed_tensors:
            algorithm = {"quant_algo": "W4A16_NVFP4", "group_size": self.scheme.kind.block[1]}
            layers = dict.fromkeys(self.quantized, algorithm)
            # SGLang 0.5.16 reads the algorithm only by module, and only next to the algorithm of the cache.
            mixed = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}
            return {"quant_method": "modelopt", **mixed, "quantized_layers": layers}
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


def _quantize(
    weights: Sequence[Tensor], scheme: FloatScheme, names: Sequence[str]
) -> tuple[list[Fp8Weight], Tensor | None]:
    """Codes and scales of each weight, and the scale that they share."""
    if scheme.name == "nvfp4":
        return quantize_nvfp4(weights, scheme.formula, names)
    if scheme.layout is not None:
        return [quantize_mxfp4(weight, name) for weight, name in zip(weights, names, strict=True)], None
    block, rounding = scheme.kind.block, scheme.formula
    return [quantize_fp8(weight, block, rounding, name) for weight, name in zip(weights, names, strict=True)], None


def _compressed_tensors_config(scheme: FloatScheme, ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors' own presets FP8_BLOCK, FP8_DYNAMIC, MXFP4A16 and NVFP4A16."""
    four_bit, width = scheme.layout is not None, scheme.kind.block[1]
    form = f"{scheme.name}-pack-quantized" if four_bit else "float-quantized"
    kind: dict[str, Any] = {"num_bits": 4 if four_bit else 8, "type": "float", "symmetric": True}
    activations: dict[str, Any] | None = None
    if four_bit:
        is_nvfp4 = scheme.name == "nvfp4"
        dtypes = dict.fromkeys(("scale_dtype", "zp_dtype"), "torch.float8_e4m3fn" if is_nvfp4 else "torch.uint8")
        weights = kind | {"strategy": "tensor_group" if is_nvfp4 else "group", "group_size": width} | dtypes
    elif width is None:
        weights = kind | {"strategy": "channel"}
        activations = kind | {"strategy": "token", "dynamic": True}
    else:
        weights = kind | {"strategy": "block", "block_structure": list(scheme.kind.block)}
        activations = kind | {"strategy": "group", "group_size": width, "dynamic": True}
    weights["dynamic"] = False
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": form}
    # Readers look up experts one by one, and a plain entry names only one module.
    entries = [rf"re:{re.escape(name)}\..*" if name.endswith(".experts") else name for name in ignore]
    head = {"quant_method": _CT, "format": form, "quantization_status": "compressed"}
    return {**head, "config_groups": {"group_0": group}, "ignore": entries}


def select(source: Checkpoint, scheme: FloatScheme, request: Request) -> FloatWeights:
    """Selects the weights, one tensor an expert, by headers. Raises CkptkitError as `select_float_weights`."""
    config = adapt_config(source.config, source.specs)
    like = request.like.specs if request.like is not None else None
    require(request.where, [f"{module}.weight" for module in sorted(class_tree(config).packable)], source.specs)
    # SGLang joins the indexer's key weight to weights in BF16. It dequantizes FP8 in blocks, and copies the codes of
    # other layouts. Source: `_load_fused_indexer_wk` of its `deepseek_weight_loader.py`.
    in_blocks = scheme.name == "fp8-block" and scheme.formula != _CT
    kept = scheme.kind.kept if in_blocks else (*scheme.kind.kept, ".indexer.wk")
    chosen = select_float_weights(source.specs, config, scheme.ignore, scheme.kind.fitted, like, kept)
    specs = [spec for name, spec in source.specs.items() if name in chosen.names]
    notes = (*_reader_notes(scheme, specs, config, request.readers), *chosen.notes)
    together = sharing_a_scale(spec.name for spec in specs) if scheme.name == "nvfp4" else ()
    for_vllm = scheme.name == "mxfp8" and set(request.readers) == {"vllm"}
    return FloatWeights(
        scheme, chosen.names, chosen.ignore, request.device, notes, together, chosen.quantized, for_vllm
    )


def _reader_notes(
    scheme: FloatScheme, chosen: Sequence[TensorSpec], config: Mapping[str, Any], readers: Sequence[str]
) -> Sequence[str]:
    """Notes on weights that engines among the readers do not load or run."""
    by_vllm = scheme.name == "mxfp4" or (scheme.name == "fp8-block" and scheme.formula != _CT)
    notes = tiles.ungated_notes(scheme.title, chosen, config, readers, ("sglang", "vllm") if by_vllm else ("sglang",))
    if scheme.layout is not None and scheme.formula == _CT and "sglang" in readers:
        weights_only = "" if scheme.name == "mxfp4" else " without quantized activations"
        return [f"SGLang 0.5.16 does not read {scheme.title} of compressed-tensors{weights_only}; vLLM does", *notes]
    if scheme.name == "nvfp4":
        unread = [_NOT_LOADED] if class_tree(config).outside and "sglang" in readers else []
        return [*unread, *tiles.kernel_notes("NVFP4", chosen, config, scheme.kind.block[1], readers)]
    # In vLLM's MXFP8 the scales have another name.
    checked = [name for name in _ENGINES if name in readers and not (scheme.name == "mxfp8" and name == "vllm")]
    engines = [_ENGINES[name] for name in checked if not engine_class(name, config).fp8_blocks]
    if scheme.name in ("fp8-block", "mxfp8") and scheme.formula != _CT and engines:
        notes += (
            f"{' and '.join(engines)}: this model's class reads weight_scale_inv as scales of another layout, and "
            f"cannot load {scheme.title}; pass --scheme fp8-channel or fp8-block with --rounding compressed-tensors",
        )
    return notes


def quantize_sample(weight: Tensor, scheme: FloatScheme) -> None:
    """As `SchemeModule.quantize_sample`."""
    _quantize([weight], scheme, ["a sample"])
