"""Where memory for tensors comes from, and where it goes when it is freed."""

from __future__ import annotations

import ctypes
import os

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of <malloc.h>
_KEPT = 8 << 20  # bytes below which freed memory is kept: experts, of which there are many


def set_up_memory() -> None:
    """Before torch is imported: from then on large tensors are made of huge pages, and what is freed of 8 MiB and more goes back to the system at once.

    New memory costs the kernel a fault for each page, of 4 KiB unless it is asked for 2 MiB, which torch (`c10/core/impl/alloc_cpu.cpp`) does only if it
    is told to. And left alone, glibc (mallopt(3)) learns from what is freed to keep up to 32 MiB, apart for every thread: matrices of a dense model,
    quantized in four threads, then hold a third of a gigabyte that nobody uses. Elsewhere nothing is changed.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _KEPT)
