"""The bytes of tensors: seen without a copy, read from and written to a place in a file. Threads may share the file."""

from __future__ import annotations

import os

import torch
from torch import Tensor

_LARGEST = 1 << 30  # Linux moves at most 2 GiB a call


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    flat = tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def write_at(descriptor: int, content: bytes | memoryview, offset: int) -> None:
    """Writes all of `content`. Raises OSError."""
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view[:_LARGEST], offset)
        view, offset = view[written:], offset + written


def read_at(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fills `buffer`. Returns how many bytes there were: fewer where the file ends. Raises OSError."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done : done + _LARGEST]], offset + done)
        if not count:
            break
        done += count
    return done
