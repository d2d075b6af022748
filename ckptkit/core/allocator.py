"""Where memory for tensors comes from, and where it goes when it is freed."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>
_KEPT = 1 << 20  # bytes below which freed memory is kept
_END = 4 << 20  # bytes that are kept at the end of a thread's memory


def set_up_memory() -> None:
    """Before torch is imported: from then on large tensors are made of huge pages, and what is freed of 1 MiB and more goes back to the system at once.

    New memory costs the kernel a fault for each page, of 4 KiB unless it is asked for 2 MiB, which torch (`c10/core/impl/alloc_cpu.cpp`) does only if it
    is told to. And left alone, glibc (mallopt(3)) learns from what is freed to keep up to 32 MiB, apart for every thread, and what it keeps falls
    into pieces: when it was left what is smaller than 8 MiB, to write 16 GB as HF took 1.5 GiB, and 1 GB took 0.6. Once told, it learns nothing more, and
    would give back all but 128 KiB at the end of what it keeps, too: what is made on the way would be new memory every time (FP8 to Megatron then took
    twice as long). Elsewhere nothing is changed.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _KEPT)
        mallopt(_TRIM_THRESHOLD, _END)
