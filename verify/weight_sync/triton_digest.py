"""Computes the sum of `device_digest` of `ckptkit.verify.weight_sync.vllm` on a GPU, in one pass without waiting."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 4096, 8  # words a program: 32 KiB, so that no parameter needs a million programs


@triton.jit(do_not_specialize=["count"])
def _sum(words, total, count, PLACE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    mixed = places * PLACE ^ tl.load(words + places, mask=inside, other=0)
    mixed *= FIRST
    mixed = (mixed ^ (mixed >> 27)) * SECOND
    mixed ^= mixed >> 31
    tl.atomic_add(total, tl.sum(tl.where(inside, mixed, 0)))


def add_words(total: Tensor, words: Tensor, factors: tuple[int, int, int]) -> None:
    """Adds every word of `words` (int64, same GPU), mixed with its index, to `total` (int64 [1]), modulo 2^64."""
    kernel: Any = _sum
    with torch.cuda.device_of(words):  # type: ignore[no-untyped-call]
        kernel[triton.cdiv(len(words), _BLOCK),](words, total, len(words), *factors, BLOCK=_BLOCK, num_warps=_WARPS)
