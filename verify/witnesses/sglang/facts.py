"""Facts about SGLang, without importing it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckptkit.quant.formats.part_names import PACKED
from ckptkit.verify.quirks import releases_of
from ckptkit.verify.witnesses.loading.engine import EngineFacts

_SHARED = re.compile(r"(.+\.mlp)\.shared_experts\.((?:gate|up|down)_proj\.\w+)")


def fuses_shared(names: Iterable[str]) -> bool:
    """Whether SGLang must load the shared expert of GLM-4.5 as one more routed expert, since it is packed as those."""
    # SGLang 0.5.16's `glm4_moe.py` cannot build a separate packed shared expert (it reads its `weight`), and silently
    # drops one in BF16 next to packed routed experts unless fusion is disabled.
    return any(_SHARED.fullmatch(name) and name.endswith(PACKED) for name in names)


def not_reloadable(names: Iterable[str]) -> list[str]:
    """The INT4 weights that SGLang cannot load a second time: those outside routed experts."""
    from ckptkit.quant.formats.packing import is_expert  # imports numpy

    packed = [name for name in names if name.endswith(PACKED)]
    is_fused = fuses_shared(packed)
    return [name for name in packed if not is_expert(name) and not (is_fused and ".shared_experts." in name)]


SGLANG = EngineFacts(
    name="sglang",
    label="SGLang",
    codes="CK50",
    tested=releases_of("sglang"),
    install="pip install sglang",
    adapter="ckptkit.verify.witnesses.sglang.adapter",
    sizes="--ep divides --tp, and --pp is 1",
    server="python -m sglang.launch_server",
    on_cpu="without a GPU INT4 and FP8 are not repacked",
    attention_whole=True,
    hidden=("SGLANG_USE_CPU_ENGINE",),
    live="ckptkit.verify.witnesses.sglang.live.server",
    fuses_shared=fuses_shared,
    not_reloadable=not_reloadable,
    updates_draft=True,
)
