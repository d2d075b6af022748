"""What the CPU kernels share: the threads that they run on, and the bits that they read."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from ckptkit.core.isolation import refuse_numba_settings
from ckptkit.transfer.copy import cores

refuse_numba_settings()  # here and not in a thread that is the first to need Numba


def bits_of(floats: Tensor) -> Tensor:
    """The bits of float32, bfloat16 or float16 as integers."""
    return floats.view(torch.int32 if floats.dtype == torch.float32 else torch.int16)


@cache
def pool() -> ThreadPoolExecutor:
    """As many threads as cores, shared by all callers of the process."""
    return ThreadPoolExecutor(cores(), "ckptkit-quantize")


# Threads do not survive a fork, and the child would wait for them.
os.register_at_fork(after_in_child=pool.cache_clear)
