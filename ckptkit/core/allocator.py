"""Sets up the allocator for large tensors."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>
_KEPT = 1 << 20  # bytes below which freed memory is kept
_END = 4 << 20  # bytes that are kept at the end of a thread's memory


def set_up_memory() -> None:
    """Makes large tensors of huge pages, and gives freed memory of 1 MiB and more back to the system at once.

    Call it before torch is imported: torch (`c10/core/impl/alloc_cpu.cpp`) asks for huge pages only if told to. By
    default glibc (mallopt(3)) adapts to what is freed and keeps up to 32 MiB a thread: writing 16 GB as HF then took
    1.5 GiB of memory, and takes 0.6 with fixed thresholds. With these it would also give back all but 128 KiB at the
    end of what it keeps, and FP8 to Megatron took twice as long; hence the second threshold. Where there is no
    mallopt, only torch is told.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _KEPT)
        mallopt(_TRIM_THRESHOLD, _END)
