"""What names alone say: which tensors a checkpoint may hold, and which of them SGLang leaves to another model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from converters.planner import expected_hf, rules_of
from quant.formats.part_names import INT4_PARTS, PACKED, WEIGHT_SCALE_INV
from verify.evidence.expected import weights_of

_SHARED = re.compile(r"(.+\.mlp)\.shared_experts\.((?:gate|up|down)_proj\.\w+)")
_DRAFT = re.compile(r".*?\bmtp\.|.*?layers\.\d+\.")
# Allocated for every packed layer of experts, but read only with activation ordering.
_G_IDX = re.compile(r".+\.experts\.w(?:13|2)_(?:weight_g_idx|g_idx_sort_indices)")

# Scales of a key-value cache in FP8, which only few checkpoints have; else what they are made with is meant.
_CACHE_SCALE = re.compile(r".+\.[kv]_scale")


def fuses_shared(names: Iterable[str]) -> bool:
    """Whether SGLang must keep the shared expert of GLM-4.5 as one more routed expert: where it is packed like those.

    SGLang 0.5.16's `glm4_moe.py` leaves no choice. It cannot build a packed shared expert of its own (it asks for its
    `weight`), and it drops one in BF16 beside packed routed experts without a word unless fusion is disabled.
    """
    return any(_SHARED.fullmatch(name) and name.endswith(PACKED) for name in names)


def promised_names(config: Mapping[str, Any]) -> Iterator[str]:
    """Every HF name that a checkpoint of this model may hold: each weight plain, and its quantized parts."""
    for name in expected_hf(config):
        yield name
        module, _, leaf = name.rpartition(".")
        if leaf == "weight":
            yield from (f"{module}.{part}" for part in (*INT4_PARTS, WEIGHT_SCALE_INV))


def routers(config: Mapping[str, Any], draft: bool = False) -> list[str]:
    """The HF names of the routers, without those of multi-token prediction layers; `draft`: those alone."""
    return [
        name
        for rule in rules_of(config)
        if rule.megatron.endswith("mlp.router.weight") and rule.megatron.startswith("mtp.") == draft
        for name in rule.hf
    ]


def has_default(param: str) -> bool:
    """Whether SGLang makes this parameter with a value that stands unless a checkpoint gives another."""
    return _CACHE_SCALE.fullmatch(param) is not None


def left_empty(param: str, config: Mapping[str, Any]) -> bool:
    """Whether SGLang allocates this parameter without wanting anything from the checkpoint in it."""
    ordered = weights_of(config).get("actorder") in ("group", "dynamic")
    return _G_IDX.fullmatch(param) is not None and (not ordered or param.endswith("_sort_indices"))


def of_draft(config: Mapping[str, Any]) -> tuple[str, ...]:
    """How the names begin of multi-token prediction layers, which SGLang loads into a draft model."""
    names = (name for rule in rules_of(config) if rule.megatron.startswith("mtp.") for name in rule.hf)
    return tuple(dict.fromkeys(match[0] for name in names if (match := _DRAFT.match(name))))


def draft_names(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Those of `names` that belong to multi-token prediction layers."""
    draft = of_draft(config)
    return [name for name in names if name.startswith(draft)]
