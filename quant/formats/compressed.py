"""Reads the format of a compressed-tensors release from its quantization_config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.side_files import quantization_of
from ckptkit.quant.formats.floats.layout import Layout, compressed_fp8, compressed_nvfp4, mxfp4, mxfp8
from ckptkit.quant.formats.groups import group_of, groups_of
from ckptkit.quant.formats.packing import PackedInt4
from ckptkit.quant.formats.part_names import FP8_SCALE
from ckptkit.quant.formats.release import Floats
from ckptkit.quant.formats.scheme import (
    BITS,
    EXPERTS_ZERO_POINTS,
    FORMAT,
    GROUP_SIZES,
    IN_ORDER,
    SCALE_DTYPES,
    QuantScheme,
    parse,
    read_scheme,
)

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

_FP8 = ("float-quantized", "naive-quantized")
_MXFP8, _MXFP4, _NVFP4 = "mxfp8-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized"
_HINT = "start from the unquantized release, or from INT4, FP8, MXFP8, MXFP4 or NVFP4 of compressed-tensors"
# Values of QuantizationArgs that do not change how weights are stored.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "actorder": IN_ORDER,
    "block_structure": (None,),
    "dynamic": (False,),
    "group_size": (None,),
    "observer": (None, "minmax", "mse"),
    "scale_dtype": (None, *(f"torch.{dtype}" for dtype in SCALE_DTYPES)),
    "zp_dtype": (None, "torch.int8"),
}
_GROUP = frozenset({"input_activations", "output_activations", "format"})


def compressed_format(content: Mapping[str, Any]) -> Floats | PackedInt4:
    """Returns the format of the quantized weights. Raises CkptkitError, naming the key, for unsupported values."""
    _refuse_reordered(content)
    if (usual := _usual_int4(content)) is not None:
        return usual
    if (floats := compressed_floats(content)) is not None:
        groups = groups_of({"quantization_config": content})
        if all(_is_float(group.weights) for group in groups if group.weights):
            return floats
    return _parse_int4(content)


def compressed_floats(content: Mapping[str, Any]) -> Floats | None:
    """Returns the formats of groups of floats, or None. Raises CkptkitError, naming the key, for unsupported values."""
    raw = content.get("config_groups")
    if not isinstance(raw, Mapping) or not any(
        isinstance(group, Mapping) and _is_float(group.get("weights") or {}) for group in raw.values()
    ):
        return None
    groups = groups_of({"quantization_config": content})
    layouts = [
        _layout(group.weights, one.get("format") or content.get("format"), one.get("input_activations"))
        if _is_float(group.weights)
        else None
        for group, one in zip(groups, raw.values(), strict=True)
    ]

    def of_module(module: str) -> Layout | None:
        group = group_of(groups, module)
        return None if group is None else layouts[groups.index(group)]

    return Floats(tuple(dict.fromkeys(filter(None, layouts))), of_module, content.get("kv_cache_scheme") is not None)


def _is_float(weights: Any) -> bool:
    return isinstance(weights, Mapping) and weights.get("type") == "float"


def _layout(weights: Mapping[str, Any], form: Any, inputs: Any) -> Layout:
    """The layout of one group's weights. Source: compressed-tensors `QuantizationArgs` and its compressors."""
    dynamic = inputs.get("dynamic", False) if isinstance(inputs, Mapping) else True
    _require(weights, {"symmetric": (True, None)})
    if form in _FP8 or (form == "mixed-precision" and weights.get("num_bits") == 8):
        _require(weights, {"num_bits": (8,), "strategy": ("tensor", "channel", "block")})
        return compressed_fp8(_block(weights), static=dynamic is False)
    if form == _MXFP8:
        _require(weights, {"num_bits": (8,), "strategy": ("group", None), "group_size": (32,)})
        return mxfp8(FP8_SCALE)
    if form == _MXFP4:
        _require(weights, {"num_bits": (4,), "group_size": (32,)})
        return mxfp4(packed=True)
    if form == _NVFP4:
        _require(weights, {"num_bits": (4,), "strategy": ("tensor_group", None), "group_size": (16, None)})
        # "local" is dynamic within one scale of the tensor, which is stored.
        return compressed_nvfp4(static=dynamic in (False, "local"))
    raise _unsupported(f"format {form}" if form != FORMAT else "type 'float'")


def _block(weights: Mapping[str, Any]) -> tuple[int | None, int | None]:
    if weights.get("strategy") != "block":
        return (1 if weights.get("strategy") == "channel" else None), None
    size = weights.get("block_structure")
    if isinstance(size, str):  # as "128x128"
        size = [int(part) if part.isdecimal() else 0 for part in size.split("x")]
    if not isinstance(size, (list, tuple)) or len(size) != 2 or not all(type(one) is int and one > 0 for one in size):
        raise _unsupported(f"block_structure {weights.get('block_structure')!r}")
    return size[0], size[1]


def _require(weights: Mapping[str, Any] | QuantizationArgs, known: Mapping[str, tuple[Any, ...]]) -> None:
    for key, values in known.items():
        actual = weights.get(key) if isinstance(weights, Mapping) else getattr(weights, key)
        if actual not in values:
            raise _unsupported(f"{key} {getattr(actual, 'value', actual)!r}")


def _usual_int4(content: Mapping[str, Any]) -> PackedInt4 | None:
    """Reads the usual INT4 config without the slow import of compressed-tensors; None for any other config."""
    groups, ignore = content.get("config_groups"), content.get("ignore", [])
    if not isinstance(groups, Mapping) or len(groups) != 1:
        return None
    usual = (content.get("format"), content.get("quantization_status"), content.get("kv_cache_scheme"))
    if usual != (FORMAT, "compressed", None):
        return None
    if not isinstance(ignore, list) or not all(isinstance(entry, str) for entry in ignore):
        return None
    match next(iter(groups.values())):
        case {"targets": ["Linear"], "weights": {**weights}, **rest}:
            if not all(value is None or (key, value) == ("format", FORMAT) for key, value in rest.items()):
                return None
        case _:
            return None
    observer = weights.pop("observer_kwargs", {})
    if not rest.keys() <= _GROUP or not isinstance(observer, Mapping) or EXPERTS_ZERO_POINTS in observer:
        return None
    match {key: value for key, value in weights.items() if value not in _NEUTRAL.get(str(key), ())}:
        case {"type": "int", "num_bits": 4, "symmetric": bool(symmetric), "strategy": "channel", **rest} if not rest:
            return PackedInt4(None, symmetric)
        case {"type": "int", "num_bits": 4, "symmetric": bool(symmetric), "strategy": "group", **rest} if (
            rest.keys() == {"group_size"} and isinstance(size := rest["group_size"], int) and size in GROUP_SIZES
        ):
            return PackedInt4(size, symmetric)
    return None


def stated_scheme(config: Mapping[str, Any]) -> QuantScheme:
    """Does the same as `read_scheme`, but reads the usual INT4 config without importing compressed-tensors."""
    content = quantization_of(config)
    if isinstance(content, Mapping) and content.get("quant_method") == "compressed-tensors":
        usual = _usual_int4(content)
        weights = next(iter(content["config_groups"].values()))["weights"] if usual else {}
        if usual is not None and weights.get("actorder") is None and weights.get("scale_dtype") is None:
            recorded, ignore = weights.get("observer_kwargs") or {}, tuple(content.get("ignore", ()))
            grid, search = recorded.get("grid", "minmax"), recorded.get("search", "none")
            return QuantScheme(usual.group, grid, ignore, usual.symmetric, search)
    return read_scheme(config)


def _parse_int4(content: Mapping[str, Any]) -> PackedInt4:
    """Reads INT4 with compressed-tensors. Raises CkptkitError as `compressed_format` does."""
    parsed = parse(content)
    groups = list(parsed.config_groups.values())
    weights = groups[0].weights if groups else None
    if weights is None or any(group.weights != weights for group in groups):
        raise _unsupported("config_groups that quantize weights in several ways")
    formats = {parsed.format, *(group.format for group in groups if group.format)}
    if formats != {FORMAT}:
        if formats <= set(_FP8):
            _require(weights, {"type": ("float",)})
        raise _unsupported(f"format {' and '.join(sorted(map(str, formats)))}")
    _require(weights, {"type": ("int",), "num_bits": (BITS,), "strategy": ("group", "channel")})
    layout = weights.observer_kwargs.get(EXPERTS_ZERO_POINTS, "none")
    if layout not in ("none", "sglang"):
        raise _unsupported(f"{EXPERTS_ZERO_POINTS} {layout!r}")
    static = any(group.input_activations is not None and group.input_activations.dynamic is False for group in groups)
    unused = (".input_scale", ".input_zero_point") if static else ()
    group_size = weights.group_size if weights.strategy == "group" else None
    return PackedInt4(group_size, bool(weights.symmetric), unused, layout == "sglang")


def _refuse_reordered(content: Mapping[str, Any]) -> None:
    """Raises CkptkitError for reordered columns (actorder), which compressed-tensors no longer reads."""
    groups = content.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("actorder") not in IN_ORDER:
            raise _unsupported(f"actorder {weights['actorder']!r}")


def _unsupported(setting: str) -> CkptkitError:
    return CkptkitError(
        f"config.json: a compressed-tensors release with {setting} is not supported", _HINT, code="unsupported"
    )
