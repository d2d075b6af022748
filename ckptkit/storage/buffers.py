"""Tensors as bytes and bytes as tensors, without a copy, and how bytes are cut into pieces."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Bytes of one request to a disk: with less it is slower, with more no faster.
BUFFER = 8 << 20
# Bytes of a temporary array: so small that malloc keeps it (`core/allocator.py`), and that it fits a core's cache.
ON_THE_WAY = 1 << 19


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    import torch

    flat = tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def tensor_of(content: memoryview) -> Tensor:
    """Memory as uint8 [bytes]; a tensor of all of it shares it."""
    import torch

    return torch.from_numpy(np.frombuffer(content, np.uint8))


def elements(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes, uint8 [bytes], as elements, [elements]: in the same memory unless they are not aligned."""
    return (flat.clone() if flat.storage_offset() % dtype.itemsize else flat).view(dtype)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copies as many bytes as both sides have. Other threads run meanwhile."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def cuts(offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Begin and end of pieces of `nbytes` at `offset` of a file, cut where the file has multiples of BUFFER."""
    begin = 0
    while begin < nbytes:
        end = min(nbytes, (offset + begin) // BUFFER * BUFFER + BUFFER - offset)
        yield begin, end
        begin = end


def row_cuts(rows: int, row: int, most: int = BUFFER) -> Iterator[tuple[int, int]]:
    """Begin and end of runs of rows, of `row` bytes each: of at most `most` bytes, or one row."""
    several = max(1, most // max(1, row))
    for begin in range(0, rows, several):
        yield begin, min(rows, begin + several)


def new_buffer(nbytes: int) -> NDArray[np.uint8]:
    """Memory on whole blocks, for a disk to read into and write from."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A request to a disk ends after a number of pages: after a megabyte with pages of 4 KiB, nowhere with huge ones.
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
