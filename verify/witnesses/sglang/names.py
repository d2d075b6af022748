"""What SGLang does otherwise than a checkpoint's names and shapes say."""

from __future__ import annotations

import re
from collections.abc import Iterable

from quant.formats.packing import is_expert
from quant.formats.part_names import PACKED

_SHARED = re.compile(r"(.+\.mlp)\.shared_experts\.((?:gate|up|down)_proj\.\w+)")


def fuses_shared(names: Iterable[str]) -> bool:
    """Whether SGLang must keep the shared expert of GLM-4.5 as one more routed expert: where it is packed like those.

    SGLang 0.5.16's `glm4_moe.py` leaves no choice. It cannot build a packed shared expert of its own (it asks for its
    `weight`), and it drops one in BF16 beside packed routed experts silently unless fusion is disabled.
    """
    return any(_SHARED.fullmatch(name) and name.endswith(PACKED) for name in names)


def not_reloadable(names: Iterable[str]) -> list[str]:
    """The INT4 weights that SGLang cannot load a second time: those of other layers than routed experts."""
    known = list(names)
    joined = fuses_shared(known)
    packed = (name for name in known if name.endswith(PACKED) and not is_expert(name))
    return [name for name in packed if not (joined and ".shared_experts." in name)]
