"""Reads which format a compressed-tensors release has from its quantization_config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.side_files import quantization_of
from ckptkit.quant.formats.floats.layout import Layout, compressed_fp8, compressed_nvfp4, mxfp4, mxfp8
from ckptkit.quant.formats.groups import Group, group_of, groups_of
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
_HINT = "ckptkit reads INT4, FP8, MXFP8, MXFP4 and NVFP4 of compressed-tensors: start from the unquantized release"
# Values of QuantizationArgs that do not change how weights are stored.
_SAYS_NOTHING: Mapping[str, tuple[Any, ...]] = {
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
    """Returns the format of the quantized weights. Raises CkptkitError, naming the key, for what is not supported."""
    _refuse_reordered(content)
    if (usual := usual_int4(content)) is not None:
        return usual
    floats = compressed_floats(content)
    groups = groups_of({"quantization_config": content}) if floats is not None else ()
    if floats is not None and all(_is_float(group.weights) for group in groups if group.weights):
        return floats
    return judged_format(content)


def compressed_floats(content: Mapping[str, Any]) -> Floats | None:
    """Returns the formats of the groups that store weights in floats, which others may stand beside; None without one.

    Reads them without compressed-tensors. Raises CkptkitError, naming the key, for what is not supported.
    """
    every = content.get("config_groups")
    if not isinstance(every, Mapping) or not any(
        isinstance(group, Mapping) and _is_float(group.get("weights") or {}) for group in every.values()
    ):
        return None
    groups = groups_of({"quantization_config": content})
    layouts = [
        _layout(group, stated.get("format") or content.get("format"), stated.get("input_activations"))
        if _is_float(group.weights)
        else None
        for group, stated in zip(groups, every.values(), strict=True)
    ]
    found = tuple(dict.fromkeys(layout for layout in layouts if layout is not None))

    def of_module(module: str) -> Layout | None:
        group = group_of(groups, module)
        return None if group is None else layouts[groups.index(group)]

    return Floats(found, of_module, content.get("kv_cache_scheme") is not None)


def _is_float(weights: Any) -> bool:
    return isinstance(weights, Mapping) and weights.get("type") == "float"


def _layout(group: Group, form: Any, inputs: Any) -> Layout:
    """The layout of one group's weights. Source: compressed-tensors `QuantizationArgs` and its compressors."""
    weights = group.weights
    static = isinstance(inputs, Mapping) and inputs.get("dynamic", False) is False
    _require(weights, {"symmetric": (True, None)})
    if form in _FP8 or (form == "mixed-precision" and weights.get("num_bits") == 8):
        _require(weights, {"num_bits": (8,), "strategy": ("tensor", "channel", "block")})
        return compressed_fp8(_block(weights), static=static)
    if form == _MXFP8:
        _require(weights, {"num_bits": (8,), "strategy": ("group", None), "group_size": (32,)})
        return mxfp8(FP8_SCALE)
    if form == _MXFP4:
        _require(weights, {"num_bits": (4,), "group_size": (32,)})
        return mxfp4(packed=True)
    if form == _NVFP4:
        _require(weights, {"num_bits": (4,), "strategy": ("tensor_group", None), "group_size": (16, None)})
        # "local" is dynamic within one scale of the tensor, which is stored.
        return compressed_nvfp4(static=isinstance(inputs, Mapping) and inputs.get("dynamic", False) in (False, "local"))
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


def usual_int4(content: Mapping[str, Any]) -> PackedInt4 | None:
    """Reads the usual INT4 config, that of ckptkit and most releases, without importing compressed-tensors.

    None for any other config. It may be valid too: compressed-tensors, which takes seconds to import, decides.
    """
    groups, ignore = content.get("config_groups"), content.get("ignore", [])
    group = next(iter(groups.values())) if isinstance(groups, Mapping) and len(groups) == 1 else None
    usual = (content.get("format"), content.get("quantization_status"), content.get("kv_cache_scheme"))
    match group:
        case {"targets": ["Linear"], "weights": {**weights}, **others}:
            alone = all(value is None or (key, value) == ("format", FORMAT) for key, value in others.items())
        case _:
            return None
    if usual != (FORMAT, "compressed", None) or not alone or not others.keys() <= _GROUP:
        return None
    if not isinstance(ignore, list) or not all(isinstance(one, str) for one in ignore):
        return None
    observer = weights.get("observer_kwargs", {})
    if not isinstance(observer, Mapping) or EXPERTS_ZERO_POINTS in observer:
        return None
    match {
        key: value
        for key, value in weights.items()
        if key != "observer_kwargs" and value not in _SAYS_NOTHING.get(str(key), ())
    }:
        case {"type": "int", "num_bits": 4, "symmetric": bool(symmetric), "strategy": "channel", **more} if not more:
            return PackedInt4(None, symmetric)
        case {
            "type": "int",
            "num_bits": 4,
            "symmetric": bool(symmetric),
            "strategy": "group",
            "group_size": int(size),
            **more,
        } if size in GROUP_SIZES and not more:
            return PackedInt4(size, symmetric)
    return None


def stated_scheme(config: Mapping[str, Any]) -> QuantScheme:
    """Does what `read_scheme` does, but reads the usual INT4 config without importing compressed-tensors."""
    content = quantization_of(config)
    if not isinstance(content, Mapping) or content.get("quant_method") != "compressed-tensors":
        return read_scheme(config)
    usual = usual_int4(content)
    weights = next(iter(content["config_groups"].values()))["weights"] if usual else {}
    if usual is None or weights.get("actorder") is not None or weights.get("scale_dtype") is not None:
        return read_scheme(config)
    recorded, ignore = weights.get("observer_kwargs") or {}, tuple(content.get("ignore", ()))
    grid, search = recorded.get("grid", "minmax"), recorded.get("search", "none")
    return QuantScheme(usual.group, grid, ignore, usual.symmetric, search)


def judged_format(content: Mapping[str, Any]) -> PackedInt4:
    """Reads INT4 with compressed-tensors. Raises CkptkitError as `compressed_format` does."""
    parsed = parse(content)
    groups = list(parsed.config_groups.values())
    weights = [group.weights for group in groups]
    first = weights[0] if weights else None
    if first is None or any(other != first for other in weights):
        raise _unsupported("config_groups that quantize weights in several ways")
    formats = {parsed.format, *(group.format for group in groups if group.format)}
    static = any(group.input_activations is not None and group.input_activations.dynamic is False for group in groups)
    unused = (".input_scale", ".input_zero_point") if static else ()
    if formats == {FORMAT}:
        return _packed(first, unused)
    if formats <= set(_FP8):
        _require(first, {"type": ("float",)})
    raise _unsupported(f"format {' and '.join(sorted(map(str, formats)))}")


def _refuse_reordered(content: Mapping[str, Any]) -> None:
    """Raises CkptkitError for reordered columns (actorder), which compressed-tensors no longer reads."""
    groups = content.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("actorder") not in IN_ORDER:
            raise _unsupported(f"actorder {weights['actorder']!r}")


def _packed(weights: QuantizationArgs, unused: tuple[str, ...]) -> PackedInt4:
    _require(weights, {"type": ("int",), "num_bits": (BITS,), "strategy": ("group", "channel")})
    group = weights.group_size if weights.strategy == "group" else None
    layout = weights.observer_kwargs.get(EXPERTS_ZERO_POINTS, "none")
    if layout not in ("none", "sglang"):
        raise _unsupported(f"{EXPERTS_ZERO_POINTS} {layout!r}")
    return PackedInt4(group, bool(weights.symmetric), unused, layout == "sglang")


def _unsupported(what: str) -> CkptkitError:
    return CkptkitError(
        f"config.json: a compressed-tensors release with {what} is not supported", _HINT, code="unsupported"
    )
