"""Which format the quantization_config of a compressed-tensors release describes, of those that can be dequantized here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig

from ckptkit.core.errors import CkptkitError
from quant.formats.fp8 import Fp8
from quant.formats.int4 import PackedInt4
from quant.formats.part_names import FP8_SCALE
from quant.formats.scheme import BITS, EXPERTS_ZERO_POINTS, FORMAT

_FP8 = CompressionFormat.float_quantized.value
_IN_ORDER = (None, False, "weight", "static")  # weights are stored as if there were no order
_HINT = "ckptkit reads INT4 pack-quantized and FP8 float-quantized releases: start from the unquantized release"


def compressed_format(content: Mapping[str, Any]) -> Fp8 | PackedInt4:
    """The format of every quantized weight. Raises CkptkitError, naming the key, for what can not be dequantized here."""
    _refuse_reordered(content)
    try:
        parsed = QuantizationConfig.model_validate(dict(content))
    except (
        ValueError,
        TypeError,
        KeyError,
        NotImplementedError,
    ) as error:  # pydantic's ValidationError is a ValueError
        raise CkptkitError(
            f"compressed-tensors refuses this quantization_config: {error}", "restore config.json from the release"
        ) from error
    groups = list(parsed.config_groups.values())
    weights = [group.weights for group in groups]
    first = weights[0] if weights else None
    if first is None or any(other != first for other in weights):
        raise _unsupported("config_groups that do not all quantize weights alike")
    formats = {parsed.format, *(group.format for group in groups if group.format)}
    static = any(group.input_activations is not None and group.input_activations.dynamic is False for group in groups)
    unused = (".input_scale", ".input_zero_point") if static else ()
    if formats == {FORMAT}:
        return _packed(first, unused)
    if formats == {_FP8}:
        return _float(first, unused)
    raise _unsupported(f"format {' and '.join(sorted(map(str, formats)))}")


def _refuse_reordered(content: Mapping[str, Any]) -> None:
    """Raises CkptkitError where columns were grouped in another order, which compressed-tensors no longer reads at all."""
    groups = content.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("actorder") not in _IN_ORDER:
            raise _unsupported(f"actorder {weights['actorder']!r}")


def _packed(weights: QuantizationArgs, unused: tuple[str, ...]) -> PackedInt4:
    _require(weights, {"type": ("int",), "num_bits": (BITS,), "strategy": ("group", "channel")})
    if EXPERTS_ZERO_POINTS in weights.observer_kwargs:
        raise _unsupported("zero points of experts in SGLang's own layout")
    group = weights.group_size if weights.strategy == "group" else None
    return PackedInt4(group, bool(weights.symmetric), unused)


def _float(weights: QuantizationArgs, unused: tuple[str, ...]) -> Fp8:
    _require(
        weights,
        {"type": ("float",), "num_bits": (8,), "strategy": ("tensor", "channel", "block"), "symmetric": (True,)},
    )
    if weights.strategy == "block":
        rows, columns = weights.block_structure
        return Fp8((rows, columns), (FP8_SCALE,), unused=unused)
    return Fp8((1 if weights.strategy == "channel" else None, None), (FP8_SCALE,), unused=unused)


def _require(weights: QuantizationArgs, known: Mapping[str, tuple[Any, ...]]) -> None:
    for key, values in known.items():
        actual = getattr(weights, key)
        if actual not in values:
            raise _unsupported(f"{key} {getattr(actual, 'value', actual)!r}")


def _unsupported(what: str) -> CkptkitError:
    return CkptkitError(f"config.json: a compressed-tensors release with {what} is not supported", _HINT)
