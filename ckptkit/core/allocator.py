"""Reduces the cost of a large model's memory: in glibc's malloc, and in garbage collection."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>
_LARGE = 1 << 20  # freed blocks of at least this size are returned to the system
IN_FLIGHT = 512 << 20  # default limit for the bytes of tensors that a run reads, computes or writes at one time
_KEPT = 4 << 20  # bytes that each thread keeps


def return_freed_memory() -> None:
    """Makes glibc return large freed blocks to the system; no effect with other C libraries.

    By default glibc (mallopt(3)) adapts to keep up to 32 MiB per thread, which get fragmented: a dense model of 6 GB
    takes up to 1.7 times the memory. _KEPT prevents it from returning small blocks too, which slows dequantizing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, _KEPT)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses garbage collection while headers are read: it takes up to a third of the time, and frees nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
