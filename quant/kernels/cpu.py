"""Packs weights as INT4 on all cores of a CPU, with the bytes of `quant.formats.grids`.

`quant.kernels.cpu_kernel` is compiled at the first call for a combination of dtypes and grid, which takes seconds.
Later processes load it from Numba's cache on disk in a fraction of a second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from ckptkit.transfer.copy import cores
from quant.formats.grids import not_finite
from quant.formats.packing import CODES_PER_WORD, Packed, pack_zero_point
from quant.formats.scheme import QuantScheme
from quant.kernels.cpu_kernel import kernel

_TASK = 1 << 20  # weights that a thread takes at a time, about half a millisecond


def quantize_pack_cpu(weights: Sequence[Tensor], scheme: QuantScheme, names: Sequence[str]) -> list[Packed]:
    """As `quant.kernels.dispatch.quantize_pack`, for matrices in memory and schemes without a search.

    Large matrices are divided among the cores; calls from several threads share them.
    """
    jobs = [_Job(weight, scheme) for weight in weights]
    tasks = [(job, first, last) for job in jobs for first, last in job.tasks()]
    results = pool().map(_run, tasks) if len(tasks) > 1 and cores() > 1 else map(_run, tasks)
    bad = {job for job, wrong in results if wrong}
    for job, name in zip(jobs, names, strict=True):
        if job in bad:
            raise not_finite(job.weight, job.scale.dtype, name)
    return [job.packed() for job in jobs]


class _Job:
    """One matrix and what is made of it."""

    def __init__(self, weight: Tensor, scheme: QuantScheme) -> None:
        rows, columns = weight.shape
        dtype, groups = scheme.scale_dtype or weight.dtype, scheme.groups(columns)
        self.weight = weight.detach().contiguous()
        self.words = torch.empty(rows, columns // CODES_PER_WORD, dtype=torch.int32)
        self.scale = torch.empty(rows, groups, dtype=dtype)
        self.zero_point = None if scheme.symmetric else torch.empty(rows, groups, dtype=torch.int8)
        if not columns:
            self.scale.fill_(torch.finfo(dtype).eps)
            self.zero_point = None if scheme.symmetric else torch.zeros(rows, groups, dtype=torch.int8)
        self.size = scheme.group_size or columns
        self.kernel = kernel(weight.dtype, dtype, scheme.grid, scheme.symmetric)

    def tasks(self) -> Iterator[tuple[int, int]]:
        """First and last group of each part; none where there are no weights."""
        step = max(1, _TASK // max(self.size, 1))
        groups = self.scale.numel() if self.size else 0
        return ((first, min(first + step, groups)) for first in range(0, groups, step))

    def run(self, first: int, last: int) -> bool:
        """Quantizes these groups. Returns whether a weight or a scale is not finite."""
        zeros = torch.empty(0, dtype=torch.int8) if self.zero_point is None else self.zero_point
        arrays = (bits_of(self.weight), self.words.view(torch.uint8), bits_of(self.scale), zeros)
        return self.kernel(*(array.flatten().numpy() for array in arrays), first, last, self.size)

    def packed(self) -> Packed:
        """The finished parts."""
        return Packed(self.words, self.scale, None if self.zero_point is None else pack_zero_point(self.zero_point))


def _run(task: tuple[_Job, int, int]) -> tuple[_Job, bool]:
    job, first, last = task
    return job, job.run(first, last)


def bits_of(floats: Tensor) -> Tensor:
    """The bits of float32, bfloat16 or float16 as integers."""
    return floats.view(torch.int32 if floats.dtype == torch.float32 else torch.int16)


@cache
def pool() -> ThreadPoolExecutor:
    """As many threads as cores, shared by all callers of the process."""
    return ThreadPoolExecutor(cores(), "ckptkit-quantize")


# Threads do not survive a fork, and the child would wait for them.
os.register_at_fork(after_in_child=pool.cache_clear)
