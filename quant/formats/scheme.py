"""Defines the INT4 scheme: group size, grid, scale dtype and ignored modules, and its form in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ckptkit.core.dtypes import dtype_name
from ckptkit.core.errors import CkptkitError, words_of
from ckptkit.core.printable import shortened
from ckptkit.formats.hf.side_files import describe_quantization, quantization_of
from ckptkit.quant.patterns import check_entries

if TYPE_CHECKING:
    import torch
    from compressed_tensors.quantization import QuantizationConfig

Grid = Literal["qmax7", "minmax"]
Search = Literal["none", "mse"]

# Values of actorder with which GPTQ stores columns in order: only the codes differ from rounding to nearest.
IN_ORDER = (None, False, "weight", "static")
GROUP_SIZES = (32, 64, 128)
GRIDS: tuple[Grid, ...] = ("qmax7", "minmax")
SEARCHES: tuple[Search, ...] = ("none", "mse")
SCALE_DTYPES = ("float32", "bfloat16", "float16")
BITS = 4
CODES_PER_WORD = 32 // BITS
FORMAT = "pack-quantized"
# A key of observer_kwargs; "sglang" if routed experts' zero points have the layout that only SGLang reads.
EXPERTS_ZERO_POINTS = "experts_zero_points"
# Another; true if some scales were kept from an INT4 checkpoint on another or an unknown grid than `grid`.
KEPT_SCALES = "kept_scales"


@dataclass(frozen=True)
class QuantScheme:
    """How weight matrices become INT4, and which modules do not. `ckptkit.quant.formats.grids` has the formulas.

    Raises CkptkitError for a group size that no INT4 kernel has, unknown or contradictory options, and patterns that
    `check_entries` refuses.
    """

    name: ClassVar[str] = "w4a16"  # the value of `--quantize`
    title: ClassVar[str] = "INT4"  # in messages
    group_size: int | None  # neighbours along the input dimension that share a scale, or None for one scale a row
    grid: Grid
    ignore: tuple[str, ...] = ()  # in the pattern language of compressed-tensors
    symmetric: bool = True
    search: Search = "none"
    scale_dtype: torch.dtype | None = None  # of stored scales, or None for the weight's

    def __post_init__(self) -> None:
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            hint = f"choose one of {', '.join(map(str, GROUP_SIZES))}, or one scale per row (channel)"
            raise CkptkitError(f"group size {self.group_size} is not supported", hint, code="unsupported")
        for option, value, known in (("grid", self.grid, GRIDS), ("search", self.search, SEARCHES)):
            if value not in known:
                raise CkptkitError(f"unknown {option} {value!r}", f"choose one of {', '.join(known)}")
        if self.scale_dtype is not None and dtype_name(self.scale_dtype) not in SCALE_DTYPES:
            raise CkptkitError(f"unknown scale dtype {self.scale_dtype}", f"choose one of {', '.join(SCALE_DTYPES)}")
        if self.grid == "qmax7" and not self.symmetric:
            raise CkptkitError("the qmax7 grid has only symmetric scales", "use the minmax grid for asymmetric scales")
        if self.grid == "qmax7" and self.search != "none":
            message = "a search on the qmax7 grid would change the scales to which training rounds"
            raise CkptkitError(message, "use the minmax grid, or remove the search")
        check_entries(self.ignore, "ignore")

    @property
    def is_slow(self) -> bool:
        """Whether one core does not keep up with a disk: where scales are searched for."""
        return self.search != "none"

    def command_line(self) -> list[str]:
        """The options of `ckptkit quantize` that give this scheme."""
        words = ["--group-size", str(self.group_size or "channel"), "--grid", self.grid]
        words += [] if self.symmetric else ["--asymmetric"]
        words += ["--search", self.search] if self.search != "none" else []
        words += ["--scale-dtype", dtype_name(self.scale_dtype)] if self.scale_dtype else []
        return words + [word for pattern in self.ignore for word in ("--ignore", pattern)]

    def check_preset(self) -> None:
        """Raises CkptkitError unless this is the grid that training rounds weights to (`--preset rl`)."""
        if not self.symmetric or self.grid != "qmax7":
            message = "--preset rl requires symmetric scales on the qmax7 grid, as training rounds weights"
            raise CkptkitError(message, "remove --asymmetric, --grid and --search")

    @property
    def divisor(self) -> int:
        """The number that must divide the input features: the group size, or the codes in a word."""
        return self.group_size or CODES_PER_WORD

    def groups(self, columns: int) -> int:
        """Returns how many scales a row of `columns` weights has."""
        return columns // self.group_size if self.group_size else 1


def quantization_config(
    scheme: QuantScheme, *, sglang_experts: bool = False, kept_scales: bool = False
) -> dict[str, Any]:
    """Builds the `quantization_config` of config.json with compressed-tensors' own classes, which validate it.

    `weights.observer_kwargs` records the grid, the search, `sglang_experts` (the layout of routed experts' zero points)
    and `kept_scales` (some scales are on another grid): of the weight arguments only this key can hold anything.
    Key names and order: compressed-tensors `ModelCompressor.update_config`.
    """
    # Imported here because it imports transformers, which takes seconds.
    import compressed_tensors
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
    from compressed_tensors.quantization import QuantizationScheme as CompressedTensorsScheme

    observer: dict[str, Any] = {"grid": scheme.grid}
    if scheme.search != "none":
        observer["search"] = scheme.search
    if sglang_experts:
        observer[EXPERTS_ZERO_POINTS] = "sglang"
    if kept_scales:
        observer[KEPT_SCALES] = True
    weights = QuantizationArgs(
        num_bits=BITS,
        type="int",
        symmetric=scheme.symmetric,
        strategy="group" if scheme.group_size else "channel",
        group_size=scheme.group_size,
        scale_dtype=scheme.scale_dtype,
        observer="minmax",
        observer_kwargs=observer,
    )
    group = CompressedTensorsScheme(targets=["Linear"], weights=weights, format=FORMAT)
    config = QuantizationConfig(
        config_groups={"group_0": group}, format=FORMAT, quantization_status="compressed", ignore=list(scheme.ignore)
    )
    content: dict[str, Any] = config.model_dump(mode="json", exclude={"moe_sparsity_config"})
    return content | {"version": compressed_tensors.__version__}


def parse(content: Mapping[str, Any]) -> QuantizationConfig:
    """Parses a `quantization_config` with compressed-tensors. Raises CkptkitError if it is invalid."""
    # Imported here because it imports transformers, which takes seconds.
    from compressed_tensors.quantization import QuantizationConfig

    try:
        parsed: QuantizationConfig = QuantizationConfig.model_validate(dict(content))
    except (ValueError, TypeError, KeyError, NotImplementedError) as error:  # pydantic's is a ValueError
        message = f"compressed-tensors refuses this quantization_config: {words_of(error)}"
        raise CkptkitError(message, "restore config.json from the release") from error
    return parsed


def get_list(content: Mapping[str, Any], key: str) -> list[Any]:
    """A list of a `quantization_config`, empty if missing or null. Raises CkptkitError for anything else."""
    value = content.get(key)
    if value is not None and not isinstance(value, list):
        raise CkptkitError(
            f"config.json: `{key}` is {shortened(value)}, not a list", "write a list of module names and `re:` patterns"
        )
    return value or []


def read_scheme(config: Mapping[str, Any]) -> QuantScheme:
    """Reads the scheme of an INT4 checkpoint from the content of config.json.

    Only ckptkit records the grid; for checkpoints of other tools it is `minmax`, compressed-tensors' own.
    Raises CkptkitError without a `quantization_config`, or if SGLang's INT4 kernels or ckptkit do not support it.
    """
    content = quantization_of(config)
    if not isinstance(content, Mapping):
        raise CkptkitError(describe_quantization(config), "pass a checkpoint that `ckptkit quantize` wrote")
    _require("quant_method", content.get("quant_method"), "compressed-tensors")
    _require("format", content.get("format"), FORMAT)
    check_entries(get_list(content, "ignore"), "config.json: ignore")
    parsed = parse(content)
    _require("kv_cache_scheme", parsed.kv_cache_scheme, None)
    _require("number of config_groups", len(parsed.config_groups), 1)
    group = next(iter(parsed.config_groups.values()))
    _require("targets", list(group.targets), ["Linear"])
    _require("input_activations", group.input_activations, None)
    _require("output_activations", group.output_activations, None)
    if (weights := group.weights) is None:
        raise CkptkitError("config.json: config_groups quantize no weights", "restore it from the release")
    for key, expected in {"num_bits": BITS, "type": "int", "dynamic": False}.items():
        _require(key, getattr(weights, key), expected)
    if weights.actorder not in IN_ORDER:
        _require("actorder", weights.actorder, None)
    if weights.strategy != "channel":
        _require("strategy", weights.strategy, "group")
    size = weights.group_size if weights.strategy == "group" else None
    grid, search = weights.observer_kwargs.get("grid", "minmax"), weights.observer_kwargs.get("search", "none")
    ignore = tuple(parsed.ignore or ())
    return QuantScheme(size, grid, ignore, bool(weights.symmetric), search, weights.scale_dtype)


def _require(key: str, actual: object, expected: object) -> None:
    if actual != expected:
        message = f"quantization_config: {key} is {actual!r}, but only {expected!r} is supported"
        raise CkptkitError(message, "start from a checkpoint with INT4 weights only (W4A16)", code="unsupported")
