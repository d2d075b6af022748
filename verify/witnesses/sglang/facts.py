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
    names="verify.witnesses.sglang.names",
    updates_draft=True,
)
