"""Weights in 8-bit and 4-bit floats with a scale for each block, row or few neighbours, as schemes.

`N.weight` becomes codes under the same name, with its scales beside it in `N.weight_scale_inv` or, as
compressed-tensors and ModelOpt write them, `N.weight_scale`; codes of 4 bits stand two a byte, for compressed-tensors
in `N.weight_packed`. Activations are quantized by the engine while it runs, if at all.
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
# Engines build it of five parts. Blocks must divide each, and one is a number a head.
_MIXER = (".mixer.in_proj", ".mamba.in_proj")
_ENGINES = {"sglang": "SGLang 0.5.16", "vllm": "vLLM 0.26"}
_NOT_LOADED = (
    "SGLang 0.5.16 does not load Qwen2.5-VL and Qwen3-VL so, and builds the draft layers of Qwen3.5 unquantized (leave "
    r"those out: --ignore 're:mtp\..*')"
)


@dataclass(frozen=True)
class _Kind:
    """One of the schemes."""

    title: str
    block: tuple[int, int | None]  # rows and columns that share a scale; None: a whole row
    roundings: tuple[str, ...]  # the first is the default
    fitted: tuple[int, int]  # what must divide the rows of a layer that engines join of several, and columns
    updates: str | None = None  # the rounding of trainers that update an engine in this format
    layouts: tuple[Layout, ...] = ()  # how codes of 4 bits and their scales are stored, by rounding
    kept: tuple[str, ...] = ()  # endings of modules that engines hold in BF16 in this format alone


_KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        "fp8-block": _Kind(
            "FP8 in blocks",
            (128, 128),
            ("online", "slime", "slime-cuda", "transformers", "deepgemm", _CT),
            (128, 128),
            "online",
            kept=_MIXER,
        ),
        "fp8-channel": _Kind("FP8 in rows", (1, None), ("slime", "slime-cuda", _CT), (16, 16)),
        "mxfp8": _Kind("MXFP8", (1, 32), ("modelopt",), (1, 32), "modelopt"),
        "mxfp4": _Kind("MXFP4", (1, 32), (_CT,), (16, 32), layouts=(mxfp4(packed=True),)),
        "nvfp4": _Kind(
            "NVFP4",
            (1, 16),
            ("modelopt", _CT),
            (16, 16),
            layouts=(modelopt_nvfp4(static=False), compressed_nvfp4(static=False)),
            # SGLang computes with halves of the first by itself. It has a scale for each part of the others, and fills
            # one.
            kept=(".kv_b_proj", ".in_proj_qkvz", *_MIXER),
        ),
    }
)


@dataclass(frozen=True)
class FloatScheme:
    """How weights become 8-bit or 4-bit floats, and which modules do not.

    `rounding` is the writer whose bytes are wanted, of `ckptkit.quant.kernels.float_roundings`; None: the first that
    the scheme has. Raises CkptkitError for a name or a rounding that is not known, and patterns that `check_entries`
    refuses.
    """

    is_slow: ClassVar[bool] = False  # whether one core does not keep up with a disk
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
    def layout(self) -> Layout | None:
        """How codes of 4 bits are stored; None: the codes have 8."""
        at = self.kind.roundings.index(self.formula)
        return self.kind.layouts[at] if self.kind.layouts else None

    @property
    def title(self) -> str:
        """The scheme in messages."""
        return self.kind.title

    def command_line(self) -> list[str]:
        """The options of `ckptkit quantize` that give this scheme, less its name."""
        words = ["--rounding", self.formula, *(["--exact"] if self.exact else [])]
        return words + [word for pattern in self.ignore for word in ("--ignore", pattern)]

    def check_preset(self) -> None:
        """Raises CkptkitError unless updates of an engine are rounded so (`--preset rl`)."""
        if self.kind.updates is None:
            raise CkptkitError(
                f"--preset rl is not for {self.name}: no trainer updates an engine in it", "quantize to fp8-block"
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
    """Which weights of one checkpoint are quantized, and how, to 8-bit and 4-bit floats."""

    scheme: FloatScheme
    names: Collection[str]
    ignore: tuple[str, ...]  # whole names of modules that are not quantized
    device: str = "cpu"
    notes: tuple[str, ...] = ()  # what to know before the result is served
    together: tuple[tuple[str, ...], ...] = ()  # weights quantized in one step, since they share a scale
    quantized: tuple[str, ...] = ()  # modules by every name that an engine asks by
    # Whether MXFP8 is spelled as vLLM's class of ModelOpt's format reads it.
    for_vllm: bool = False
    advice: str | None = None  # which options would lose less, where they may be used
    # How far each weight that `pack` has packed is from its source, by the name of the tensor with its codes.
    errors: dict[str, SquaredError] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What happens to a weight, for the dry run."""
        return f"quantize {self.scheme.name}"

    def shapes(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """The tensors that a weight becomes."""
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
        """Quantizes weights, those of one step, to what `shapes` announces, one after the other."""
        scheme, names = self.scheme, [spec.name for spec in specs]
        weights = [tensor.to(self.device) for tensor in tensors]
        packed, second = _quantize(weights, scheme, names)
        ending = "" if scheme.layout is None else scheme.layout.codes
        for weight, tensor, one, name in zip(weights, tensors, packed, names, strict=True):
            whole = one
            if second is not None and scheme.layout is not None:  # codes are multiplied by what two scales make
                scales = one.scales.float()
                whole = one._replace(scales=scales / second if scheme.layout.divides else scales * second)
            if scheme.exact:
                check_exact(weight, whole, scheme.kind.block, name)
            on_cpu = Fp8Weight(whole.codes.cpu(), whole.scales.cpu())
            self.errors[name + ending] = float_error(tensor, on_cpu, scheme.kind.block)
        shared = [] if second is None else [second]
        return [part.cpu() for one in packed for part in (*one, *shared)]

    def config(self) -> dict[str, Any]:
        """The `quantization_config` of the result."""
        if self.scheme.name == "nvfp4" and not self._is_compressed_tensors:
            algorithm = {"quant_algo": "W4A16_NVFP4", "group_size": self.scheme.kind.block[1]}
            layers = dict.fromkeys(self.quantized, algorithm)
            # SGLang 0.5.16 knows the algorithm by module alone, and only beside a cache's.
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
    kind = {"num_bits": 4 if four_bit else 8, "type": "float", "symmetric": True}
    activations: dict[str, Any] | None = None
    if four_bit:
        is_nvfp4 = scheme.name == "nvfp4"
        dtypes = dict.fromkeys(("scale_dtype", "zp_dtype"), "torch.float8_e4m3fn" if is_nvfp4 else "torch.uint8")
        weights: dict[str, Any] = kind | {"strategy": "tensor_group" if is_nvfp4 else "group", "group_size": width}
        weights |= dtypes
    elif width is None:
        weights = kind | {"strategy": "channel"}
        activations = kind | {"strategy": "token", "dynamic": True}
    else:
        weights = kind | {"strategy": "block", "block_structure": list(scheme.kind.block)}
        activations = kind | {"strategy": "group", "group_size": width, "dynamic": True}
    weights["dynamic"] = False
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": form}
    # Readers ask about experts one by one, and a plain entry names one module alone.
    entries = [rf"re:{re.escape(name)}\..*" if name.endswith(".experts") else name for name in ignore]
    return {
        "quant_method": _CT,
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": entries,
    }


def select(source: Checkpoint, scheme: FloatScheme, request: Request) -> FloatWeights:
    """Decides what is quantized. `source` has one tensor an expert.

    Raises CkptkitError, before anything is read, as `select_float_weights` does.
    """
    config = adapt_config(source.config, source.specs)
    like = request.like.specs if request.like is not None else None
    require(request.where, [f"{module}.weight" for module in sorted(class_tree(config).packable)], source.specs)
    kind = scheme.kind
    chosen = select_float_weights(source.specs, config, scheme.ignore, kind.fitted, like, _kept(scheme))
    specs = [spec for name, spec in source.specs.items() if name in chosen.names]
    return FloatWeights(
        scheme,
        chosen.names,
        chosen.ignore,
        request.device,
        (*_reader_notes(scheme, specs, config, request.readers), *chosen.notes),
        sharing_a_scale(spec.name for spec in specs) if scheme.name == "nvfp4" else (),
        chosen.quantized,
        for_vllm=scheme.name == "mxfp8" and set(request.readers) == {"vllm"},
    )


def _kept(scheme: FloatScheme) -> tuple[str, ...]:
    """Endings of modules that stay as they are.

    SGLang joins the indexer's key weight to weights in BF16. It dequantizes it from FP8 in blocks, and copies codes and
    scales of any other layout into it as they are. Source: `_load_fused_indexer_wk` of its `deepseek_weight_loader.py`.
    """
    in_blocks = scheme.name == "fp8-block" and scheme.formula != _CT
    return scheme.kind.kept if in_blocks else (*scheme.kind.kept, ".indexer.wk")


def _reader_notes(
    scheme: FloatScheme, chosen: Sequence[TensorSpec], config: Mapping[str, Any], readers: Sequence[str]
) -> Sequence[str]:
    """What engines among the readers do not load or run of it."""
    by_vllm = scheme.name == "mxfp4" or (scheme.name == "fp8-block" and scheme.formula != _CT)
    notes = tiles.ungated_notes(scheme.title, chosen, config, readers, ("sglang", "vllm") if by_vllm else ("sglang",))
    if scheme.layout is not None and scheme.formula == _CT and "sglang" in readers:
        weights_only = "" if scheme.name == "mxfp4" else " without quantized activations"
        return [f"SGLang 0.5.16 does not read {scheme.title} of compressed-tensors{weights_only}; vLLM does", *notes]
    if scheme.name == "nvfp4":
        unread = [_NOT_LOADED] if class_tree(config).outside and "sglang" in readers else []
        return [*unread, *tiles.kernel_notes("NVFP4", chosen, config, scheme.kind.block[1], readers)]
    # vLLM has a spelling of MXFP8 of its own, in which the scales have another name.
    asked = [name for name in _ENGINES if name in readers and not (scheme.name == "mxfp8" and name == "vllm")]
    engines = [_ENGINES[name] for name in asked if not engine_class(name, config).fp8_blocks]
    if scheme.name in ("fp8-block", "mxfp8") and scheme.formula != _CT and engines:
        notes += (
            f"{' and '.join(engines)}: this model's class takes weight_scale_inv for scales of another layout, and "
            f"loads none of {scheme.title}; use --scheme fp8-channel or fp8-block with --rounding compressed-tensors",
        )
    return notes


def quantize_sample(weight: Tensor, scheme: FloatScheme) -> None:
    """As `SchemeModule.quantize_sample`."""
    _quantize([weight], scheme, ["a sample"])
