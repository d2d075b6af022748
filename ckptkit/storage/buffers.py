"""Views tensors as bytes and bytes as tensors without a copy, and cuts bytes into pieces."""

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

BUFFER = 8 << 20  # bytes of one request to a disk: fewer are slower, more are not faster
ON_THE_WAY = 1 << 19  # bytes of a temporary array, which malloc keeps (`core/allocator.py`) and a core's cache holds


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    import torch

    flat = tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def tensor_of(content: memoryview) -> Tensor:
    """Memory as a tensor that shares it, uint8 [bytes]."""
    import torch

    return torch.from_numpy(np.frombuffer(content, np.uint8))


def elements(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """Views bytes, uint8 [bytes], as elements, [elements]; copies them if they are not aligned."""
    return (flat.clone() if flat.storage_offset() % dtype.itemsize else flat).view(dtype)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copies bytes between buffers of the same size, without blocking other threads."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def cuts(offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Begin and end of pieces of `nbytes` at `offset` of a file, cut at multiples of BUFFER in the file."""
    begin = 0
    while begin < nbytes:
        end = min(nbytes, (offset + begin) // BUFFER * BUFFER + BUFFER - offset)
        yield begin, end
        begin = end


def row_cuts(rows: int, row: int, most: int = BUFFER) -> Iterator[tuple[int, int]]:
    """Begin and end of runs of rows with `row` bytes each, of at most `most` bytes or one row."""
    several = max(1, most // max(1, row))
    for begin in range(0, rows, several):
        yield begin, min(rows, begin + several)


def new_buffer(nbytes: int) -> NDArray[np.uint8]:
    """Memory aligned to blocks, for direct I/O."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The kernel limits the pages of a request to a disk: to one megabyte with pages of 4 KiB.
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
