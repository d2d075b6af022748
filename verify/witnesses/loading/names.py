"""HF names that a checkpoint of a model may hold, by kind: routers, multi-token prediction layers, padded tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ckptkit.converters.ops.basic import ZeroPadded
from ckptkit.converters.planner import expected_hf, rules_of
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.engines.registry import engine_class
from ckptkit.quant.formats.dequantize import format_of
from ckptkit.quant.formats.floats.layout import Layout
from ckptkit.quant.formats.part_names import INT4_PARTS, WEIGHT_SCALE_INV
from ckptkit.quant.formats.release import Floats
from ckptkit.verify.evidence.expected import weights_of

# The scale of a layer's inputs: of a Linear, or of experts.
_OF_INPUTS = re.compile(r".+\.(?:w13_|w2_)?input(?:_global)?_scale")
_ORDER = re.compile(r".+\.experts\.(?:routed_experts\.)?w(?:13|2)_(?:weight_g_idx|g_idx_sort_indices)")
_DRAFT = re.compile(r".*?\bmtp\.|.*?layers\.\d+\.")


def promised_names(config: Mapping[str, Any]) -> Iterator[str]:
    """Every HF name that a checkpoint of this model may hold: each weight, and its quantized parts."""
    for name in expected_hf(config):
        yield name
        module, _, leaf = name.rpartition(".")
        if leaf == "weight":
            yield from (f"{module}.{part}" for part in (*INT4_PARTS, WEIGHT_SCALE_INV))


def is_unused_input_scale(param: str, config: Mapping[str, Any]) -> bool:
    """Whether a parameter is a scale of inputs, which engines allocate even if a checkpoint has only 4-bit weights."""
    layouts = _layouts(config) if _OF_INPUTS.fullmatch(param) else ()
    return bool(layouts) and all(row.second and not row.needs_input for row in layouts)


def is_unused_order(param: str, config: Mapping[str, Any]) -> bool:
    """Whether a parameter orders columns of packed experts, which engines allocate even without activation ordering."""
    is_ordered = weights_of(config).get("actorder") in ("group", "dynamic")
    return _ORDER.fullmatch(param) is not None and (not is_ordered or param.endswith("_sort_indices"))


def has_nvfp4(config: Mapping[str, Any]) -> bool:
    return any(row.second for row in _layouts(config))


def _layouts(config: Mapping[str, Any]) -> Sequence[Layout]:
    """The formats of weights in low-precision floats, or none for an unsupported format."""
    with suppress(CkptkitError):
        if isinstance(floats := format_of(config), Floats):
            return floats.layouts
    return ()


def cache_dtype(config: Mapping[str, Any], engine: str) -> str:
    """The dtype of the key-value cache that an engine needs to build this model, or "auto"."""
    return engine_class(engine, config).cache_dtype


def routers(config: Mapping[str, Any], draft: bool = False) -> list[str]:
    """The HF names of the routers, without multi-token prediction layers; with `draft` only those."""
    return [
        name
        for rule in rules_of(config)
        if rule.mapping.kind == "Router" and not rule.megatron.endswith("bias")
        if rule.megatron.startswith("mtp.") == draft
        for name in rule.hf
    ]


def padded_names(config: Mapping[str, Any]) -> Mapping[str, ZeroPadded]:
    ops = ((rule.mapping.op, rule.hf) for rule in rules_of(config))
    return {name: op for op, names in ops if isinstance(op, ZeroPadded) for name in names}


def draft_prefixes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Prefixes of the names of multi-token prediction layers, which an engine loads into a draft model."""
    names = (name for rule in rules_of(config) if rule.megatron.startswith("mtp.") for name in rule.hf)
    return tuple(dict.fromkeys(prefix[0] for name in names if (prefix := _DRAFT.match(name))))


def draft_names(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    draft = draft_prefixes(config)
    return [name for name in names if name.startswith(draft)]
