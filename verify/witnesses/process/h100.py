"""Properties of an H100 SXM, for programs that choose for one on a machine without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

CAPABILITY = (9, 0)
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    multi_processor_count=132,
    total_memory=80 << 30,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    shared_memory_per_block_optin=227 << 10,
    L2_cache_size=50 << 20,
)
