"""Predicts what vLLM makes of a layer by the name of its class, which it searches for `targets` of a config group.

Source: vLLM `compressed_tensors/utils.py`, `find_matched_target`, and `compressed_tensors.py`, where routed experts
take the target Linear over.
"""

from __future__ import annotations

from collections.abc import Sequence

from quant.formats.groups import Kind, Target
from quant.patterns.entries import matcher

_EXPERTS = "RoutedExperts"
_CLASSES = {
    "qkv_proj": "QKVParallelLinear",
    "gate_up_proj": "MergedColumnParallelLinear",
    "fused_qkv_a_proj": "DeepSeekV2FusedQkvAProjLinear",
    "o_proj": "RowParallelLinear",
    "down_proj": "RowParallelLinear",
    "lm_head": "ParallelLMHead",
}
_OTHER = "ColumnParallelLinear"  # every other class has Linear in its name too


def class_in_vllm(layer: str) -> str:
    """The class that vLLM builds a layer with; of experts by the name of one of them."""
    return _EXPERTS if ".experts." in layer else _CLASSES.get(layer.rpartition(".")[2], _OTHER)


def named_by_class(name: str, targets: Sequence[Target]) -> Kind | None:
    """What the first target makes of a class: a pattern from the start, else any part of its name in any case."""
    found = next((target.kind for target in targets if _matches(name, target.pattern)), None)
    if found is None and name == _EXPERTS:
        return next((target.kind for target in targets if target.pattern == "Linear"), None)
    return found


def _matches(name: str, pattern: str) -> bool:
    return bool(matcher(pattern)(name)) if pattern.startswith("re:") else pattern.lower() in name.lower()
