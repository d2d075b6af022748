"""What vLLM does otherwise than a checkpoint's names and shapes say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from verify.evidence.expected import weights_of
from verify.witnesses.loading.names import without_input_scale

# Scales of attention in FP8, their ranges and zero points. Few checkpoints have them; else what vLLM makes them with is
# meant. Those named `_cpu` may lie on the GPU. Sparse attention has all of them in a module `attn` up to 0.26, in the
# layer itself in 0.33.
_OF_ATTENTION = re.compile(
    r".+\.(?:mla_)?attn\.(?:_?[kqv]_scale(?:_cpu)?|[kqv]_range|_?prob_scale|[kqv]_zero_point|prob_zero_point)"
    r"|.+\.self_attn\.(?:_[kqv]_scale(?:_cpu)?|[kqv]_range|_prob_scale)"
)
# Allocated for every packed layer of experts up to 0.26, but read only with activation ordering.
_G_IDX = re.compile(r".+\.experts\.(?:routed_experts\.)?w(?:13|2)_(?:weight_g_idx|g_idx_sort_indices)")
# Which rank has which expert, when they are shared out: computed while the model is built.
_EXPERT_MAP = re.compile(r".+\.experts\.(?:routed_experts\.)?(?:_expert_map|expert_mask|expert_\w+_to_\w+)")
# Of DeepSeek-V4: its rows are padded to the heads that a kernel takes, with nothing to read there.
_SINKS = re.compile(r".+\.attn\.attn_sink")


def fuses_shared(names: Iterable[str]) -> bool:
    """Whether vLLM must keep a shared expert as one more routed expert: never."""
    return False


def has_default(param: str) -> bool:
    """Whether vLLM makes this parameter with a value that stands unless a checkpoint gives another."""
    return any(pattern.fullmatch(param) for pattern in (_OF_ATTENTION, _EXPERT_MAP, _SINKS))


def not_reloadable(names: Iterable[str]) -> list[str]:
    """The tensors that a running vLLM is known to be unable to load a second time: none."""
    return []


def left_empty(param: str, config: Mapping[str, Any]) -> bool:
    """Whether vLLM allocates this parameter without wanting anything from the checkpoint in it."""
    if without_input_scale(param, config):
        return True
    ordered = weights_of(config).get("actorder") in ("group", "dynamic")
    return _G_IDX.fullmatch(param) is not None and (not ordered or param.endswith("_sort_indices"))
