"""The INT4 scheme that ckptkit writes and reads: symmetric, one scale a group, and which modules stay as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import compressed_tensors
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from compressed_tensors.quantization import QuantizationScheme as CompressedTensorsScheme

from ckptkit.errors import CkptkitError
from ckptkit.sidefiles import quantization_of

Grid = Literal["qmax7", "minmax"]

GROUP_SIZES = (32, 64, 128)
GRIDS: tuple[Grid, ...] = ("qmax7", "minmax")
BITS = 4
FORMAT = CompressionFormat.pack_quantized.value


@dataclass(frozen=True)
class QuantScheme:
    """Group size along the input dimension, the grid (see `quant.grids`), and `ignore` in compressed-tensors' pattern language.

    Raises CkptkitError for a group size that no INT4 kernel has, an unknown grid, or a pattern that is no regular expression.
    """

    group_size: int
    grid: Grid
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.group_size not in GROUP_SIZES:
            raise CkptkitError(f"group size {self.group_size} is not supported", f"choose one of {', '.join(map(str, GROUP_SIZES))}")
        if self.grid not in GRIDS:
            raise CkptkitError(f"unknown grid {self.grid!r}", f"choose one of {', '.join(GRIDS)}")
        for pattern in self.ignore:
            _check_pattern(pattern)


def _check_pattern(pattern: str) -> None:
    if not pattern.removeprefix("re:"):
        raise CkptkitError(f"ignore pattern {pattern!r} is empty", "name a module, or give a regular expression after 're:'")
    if pattern.startswith("re:"):
        try:
            re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise CkptkitError(f"ignore pattern {pattern!r} is no regular expression: {error}", "escape dots and brackets with a backslash") from error


def quantization_config(scheme: QuantScheme) -> dict[str, Any]:
    """`quantization_config` for config.json, made by compressed-tensors' own classes, so that whatever they forbid cannot be written.

    The grid stands in `weights.observer_kwargs`: the weight arguments forbid unknown keys, this one holds anything and is read
    only by calibration. Key names and order: compressed-tensors `ModelCompressor.update_config`.
    """
    weights = QuantizationArgs(
        num_bits=BITS,
        type="int",
        symmetric=True,
        strategy="group",
        group_size=scheme.group_size,
        observer="minmax",
        observer_kwargs={"grid": scheme.grid},
    )
    group = CompressedTensorsScheme(targets=["Linear"], weights=weights, format=FORMAT)
    config = QuantizationConfig(config_groups={"group_0": group}, format=FORMAT, quantization_status="compressed", ignore=list(scheme.ignore))
    content: dict[str, Any] = config.model_dump(mode="json", exclude={"moe_sparsity_config"})
    return content | {"version": compressed_tensors.__version__}


def read_scheme(config: Mapping[str, Any]) -> QuantScheme:
    """The scheme of an INT4 checkpoint, from its whole config.json.

    The grid is known only for what ckptkit wrote; anything else reads as `minmax`, compressed-tensors' own.
    Raises CkptkitError when there is no `quantization_config`, or it is not what SGLang's INT4 kernels and ckptkit take.
    """
    content = quantization_of(config)
    if not isinstance(content, Mapping):
        raise CkptkitError("config.json has no quantization_config", "this checkpoint is not quantized")
    _require("quant_method", content.get("quant_method"), "compressed-tensors")
    _require("format", content.get("format"), FORMAT)
    try:
        parsed = QuantizationConfig.model_validate(dict(content))
    except (ValueError, TypeError, KeyError, NotImplementedError) as error:  # pydantic's ValidationError is a ValueError
        raise CkptkitError(f"compressed-tensors refuses this quantization_config: {error}", "repair config.json") from error
    _require("kv_cache_scheme", parsed.kv_cache_scheme, None)
    _require("number of config_groups", len(parsed.config_groups), 1)
    group = next(iter(parsed.config_groups.values()))
    _require("targets", list(group.targets), ["Linear"])
    _require("input_activations", group.input_activations, None)
    _require("output_activations", group.output_activations, None)
    weights = group.weights
    if weights is None:
        raise CkptkitError("quantization_config: the group quantizes no weights", "repair config.json")
    for key, expected in {"num_bits": BITS, "type": "int", "symmetric": True, "strategy": "group", "dynamic": False, "actorder": None}.items():
        _require(key, getattr(weights, key), expected)
    return QuantScheme(weights.group_size, weights.observer_kwargs.get("grid", "minmax"), tuple(parsed.ignore or ()))


def _require(key: str, actual: object, expected: object) -> None:
    if actual != expected:
        raise CkptkitError(f"quantization_config: {key} is {actual!r}, only {expected!r} is supported", "ckptkit handles symmetric INT4 in groups (W4A16)")
