"""What is known of SGLang without importing it."""

from __future__ import annotations

from verify.witnesses.loading.engine import EngineFacts

SGLANG = EngineFacts(
    name="sglang",
    label="SGLang",
    codes="CK50",
    tested=("0.5.15.post1", "0.5.16", "0.5.23"),  # lab/sglang-versions.md
    install="pip install sglang",
    adapter="verify.witnesses.sglang.adapter",
    sizes="--ep divides --tp, there is no --pp",
    server="python -m sglang.launch_server",
    on_cpu="INT4 and FP8 are not repacked without one",
    attention_whole=True,
    unfused_option="--disable-shared-experts-fusion",
    hidden=("SGLANG_USE_CPU_ENGINE",),
    live="verify.witnesses.sglang.live.server",
    # Scales of a key-value cache in FP8, which only few checkpoints have, and a number of Gemma 4's vision tower, which
    # no release has and SGLang makes 1.
    defaults=r".+\.[kv]_scale|vision_tower\.encoder\.layers\.\d+\.layer_scalar",
    not_reloadable="verify.witnesses.sglang.names.not_reloadable",
    updates_draft=True,
)
