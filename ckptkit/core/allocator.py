"""What the memory of a large model costs: what malloc holds on to, and what garbage collection looks through."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>
_LARGE = 1 << 20  # bytes from which on freed memory goes back to the system at once
IN_FLIGHT = 512 << 20  # bytes of tensors that a run reads, computes or writes at one time, unless it is told
_KEPT = 4 << 20  # bytes that are kept at the end of a thread's memory


def return_freed_memory() -> None:
    """Has glibc return large freed blocks to the system; elsewhere it changes nothing.

    Left alone, glibc (mallopt(3)) learns from what is freed to keep up to 32 MiB in every thread, which falls to
    pieces: a dense model of 6 GB takes up to 1.7 times the memory. Once told, it would also give back all but 128 KiB
    of what is small, and dequantizing takes a fifth longer.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, _KEPT)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses garbage collection while headers are read and planned with: millions of objects, all of which stay.

    Collecting looks through them again and again, which takes a tenth to a third of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
