"""Threads and tasks of the CPU kernels, and the bits of floats that they read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from ckptkit.core.isolation import refuse_numba_settings
from ckptkit.transfer.copy import cores

refuse_numba_settings()  # here and not in a thread that is the first to need Numba


TASK = 1 << 20  # weights that a thread takes at a time: they stay in its cache
Task = TypeVar("Task")
Made = TypeVar("Made")


def bits_of(floats: Tensor) -> Tensor:
    """The bits of float32, bfloat16 or float16 as integers."""
    return floats.view(torch.int32 if floats.dtype == torch.float32 else torch.int16)


def row_tasks(rows: int, columns: int, height: int) -> list[slice]:
    """Cuts the rows of a matrix into parts of complete blocks of `height` rows; an empty matrix has no parts."""
    step = max(1, TASK // max(1, columns * height)) * height
    return [slice(first, min(first + step, rows)) for first in range(0, rows if columns else 0, step)]


def on_all_cores(run: Callable[[Task], Made], tasks: Sequence[Task]) -> Iterable[Made]:
    """Runs several tasks in threads if there is more than one core; results are in the order of tasks."""
    return pool().map(run, tasks) if len(tasks) > 1 and cores() > 1 else map(run, tasks)


@cache
def pool() -> ThreadPoolExecutor:
    """One thread for each core, shared by all callers of the process."""
    return ThreadPoolExecutor(cores(), "ckptkit-quantize")


# Threads do not survive a fork, and the child would wait for them.
os.register_at_fork(after_in_child=pool.cache_clear)
