"""Tensors as bytes and bytes as tensors, without a copy, and memory that threads use again.

Memory that is used again costs nothing, and new memory a fault for each 4 KiB.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BUFFER = 8 << 20  # what a disk is asked for at once: with less it is slower, with more no faster
ON_THE_WAY = (
    1 << 19
)  # of what is only made on the way to a tensor: malloc keeps it when it is freed (`ckptkit.core.allocator`), and a core has it in its cache


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    flat = tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def tensor_of(content: memoryview) -> Tensor:
    """Memory as uint8 [bytes]; a tensor of all of it shares it."""
    return torch.from_numpy(np.frombuffer(content, np.uint8))


def elements(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """What bytes, uint8 [bytes], are as elements, [elements]: in the same memory, unless they begin where no such element may."""
    return (flat.clone() if flat.storage_offset() % dtype.itemsize else flat).view(dtype)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copies bytes, of which there are as many on both sides. Other threads run meanwhile."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def piece_buffer(length: int, use: str = "piece") -> memoryview:
    """So many bytes of memory, which up to BUFFER the next call from this thread for the same use gives again."""
    return thread_buffer(use).data[:length] if length <= BUFFER else memoryview(bytearray(length))


def cuts(offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Begin and end of pieces of at most BUFFER of so many bytes that stand at `offset` of a file: such that its blocks are not cut."""
    begin = 0
    while begin < nbytes:
        end = min(nbytes, (offset + begin) // BUFFER * BUFFER + BUFFER - offset)
        yield begin, end
        begin = end


def row_cuts(rows: int, row: int, most: int = BUFFER) -> Iterator[tuple[int, int]]:
    """Begin and end of runs of so many rows, of `row` bytes each: of at most `most` bytes, or one row."""
    several = max(1, most // max(1, row))
    for begin in range(0, rows, several):
        yield begin, min(rows, begin + several)


def new_buffer(nbytes: int) -> NDArray[np.uint8]:
    """Memory on whole blocks, for a disk to read into and write from."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A disk takes a list of pieces of memory at a time: of pages of 4 KiB that is a megabyte, of huge ones all that is asked for.
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def thread_buffer(use: str, nbytes: int = BUFFER) -> NDArray[np.uint8]:
    """Memory on whole blocks, the same whenever this thread asks for the same use."""
    if use not in _of_thread.buffers:
        _of_thread.buffers[use] = new_buffer(nbytes)
    return _of_thread.buffers[use]


class _OfThread(threading.local):
    """A buffer for each use."""

    def __init__(self) -> None:
        self.buffers: dict[str, NDArray[np.uint8]] = {}


_of_thread = _OfThread()
