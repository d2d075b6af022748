"""What SGLang does otherwise than a checkpoint's names and shapes say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from quant.formats.packing import is_expert
from quant.formats.part_names import PACKED
from verify.evidence.expected import weights_of
from verify.witnesses.loading.names import without_input_scale

_SHARED = re.compile(r"(.+\.mlp)\.shared_experts\.((?:gate|up|down)_proj\.\w+)")
# Allocated for every packed layer of experts, but read only with activation ordering.
_G_IDX = re.compile(r".+\.experts\.w(?:13|2)_(?:weight_g_idx|g_idx_sort_indices)")
# Scales of experts in NVFP4 as kernels read them: computed from others after loading.
_SWIZZLED = re.compile(r".+\.experts\.w(?:13|2)_blockscale_swizzled")
# Scales of a key-value cache in FP8, which only few checkpoints have; else what they are made with is meant.
_CACHE_SCALE = re.compile(r".+\.[kv]_scale")
# Of Gemma 4's vision tower, which has none in any release; SGLang makes it 1.
_SCALAR_OF_VISION = re.compile(r"vision_tower\.encoder\.layers\.\d+\.layer_scalar")
# Of MiniMax-M3's vision tower, which has none: allocated, and used nowhere.
_UNUSED_NORM = re.compile(r"vision_tower\.vision_model\.post_layernorm\.(?:weight|bias)")


def fuses_shared(names: Iterable[str]) -> bool:
    """Whether SGLang must keep the shared expert of GLM-4.5 as one more routed expert: where it is packed like those.

    SGLang 0.5.16's `glm4_moe.py` leaves no choice. It cannot build a packed shared expert of its own (it asks for its
    `weight`), and it drops one in BF16 beside packed routed experts silently unless fusion is disabled.
    """
    return any(_SHARED.fullmatch(name) and name.endswith(PACKED) for name in names)


def has_default(param: str) -> bool:
    """Whether SGLang makes this parameter with a value that stands unless a checkpoint gives another."""
    return any(pattern.fullmatch(param) for pattern in (_CACHE_SCALE, _SCALAR_OF_VISION))


def not_reloadable(names: Iterable[str]) -> list[str]:
    """The INT4 weights that SGLang cannot load a second time: those of other layers than routed experts."""
    known = list(names)
    joined = fuses_shared(known)
    packed = (name for name in known if name.endswith(PACKED) and not is_expert(name))
    return [name for name in packed if not (joined and ".shared_experts." in name)]


def left_empty(param: str, config: Mapping[str, Any]) -> bool:
    """Whether SGLang allocates this parameter without wanting anything from the checkpoint in it."""
    if without_input_scale(param, config):
        return not param.rpartition(".")[2].startswith("w") or not _is_blackwell()
    if _SWIZZLED.fullmatch(param) or (_UNUSED_NORM.fullmatch(param) and config.get("model_type") == "minimax_m3_vl"):
        return True
    ordered = weights_of(config).get("actorder") in ("group", "dynamic")
    return _G_IDX.fullmatch(param) is not None and (not ordered or param.endswith("_sort_indices"))


def _is_blackwell() -> bool:
    """Whether kernels of experts that SGLang chooses quantize inputs in any case (0.5.16, but for Marlin)."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)
