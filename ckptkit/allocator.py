"""What the C library does with memory that is freed."""

from __future__ import annotations

import ctypes

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of <malloc.h>
_KEPT = 8 << 20  # bytes below which freed memory is kept: experts, of which there are many


def give_back_large_memory() -> None:
    """From now on, what this process frees of 8 MiB and more goes back to the system at once.

    Left alone, glibc (mallopt(3)) learns from what is freed to keep up to 32 MiB, apart for every thread: matrices of a dense model, quantized in four
    threads, then hold a third of a gigabyte that nobody uses. Elsewhere nothing is changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _KEPT)
