"""The bytes of tensors: seen without a copy, read from and written to places in files. Threads may share a file.

Large pieces go past the page cache where the file system allows it (open(2), O_DIRECT): a checkpoint is read or written once, and to
keep what nobody will ask for again costs the kernel a page of memory for each 4 KiB, and the machine what it had cached before.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LARGEST = 1 << 30  # Linux moves at most 2 GiB a call
_BLOCK = 4096  # offsets and sizes past the page cache are multiples of this
_LARGE = 1 << 20  # pieces from this size on go past the page cache
BUFFER = 8 << 20
# What file systems say that have no such way: tmpfs, some network and some stacked ones.
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    flat = tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


class Extent(Protocol):
    """Bytes of a file that are those of a tensor, or of a part of it, as they are; and the CRC-32 to check, where reading them does not."""

    @property
    def path(self) -> Path: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def crc(self) -> int | None: ...

    def read(self, buffer: memoryview, start: int) -> None:
        """Fills `buffer` with the bytes from `start`, which is where the last call ended. Raises OSError and CkptkitError."""


@dataclass(frozen=True)
class FileExtent:
    """Bytes that can be read piece by piece; and the CRC-32 that they were written with, if one was."""

    path: Path
    offset: int
    nbytes: int
    crc: int | None = None

    def read(self, buffer: memoryview, start: int) -> None:
        """Fills `buffer` with the bytes from `start`. Raises OSError, also where the file ends."""
        if read_into(self.path, buffer, self.offset + start) != len(buffer):
            raise OSError(errno.EIO, "the file ends too early", str(self.path))


def piece_buffer(length: int, use: str = "piece") -> memoryview:
    """So many bytes of memory, which up to BUFFER the next call from this thread for the same use gives again."""
    return _buffer(use).data[:length] if length <= BUFFER else memoryview(bytearray(length))


def cuts(offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Begin and end of pieces of at most BUFFER of so many bytes that stand at `offset` of a file: such that its blocks are not cut."""
    begin = 0
    while begin < nbytes:
        end = min(nbytes, (offset + begin) // BUFFER * BUFFER + BUFFER - offset)
        yield begin, end
        begin = end


def row_cuts(rows: int, row: int) -> Iterator[tuple[int, int]]:
    """Begin and end of runs of so many rows, of `row` bytes each: of at most BUFFER bytes, or one row."""
    several = max(1, BUFFER // row)
    for begin in range(0, rows, several):
        yield begin, min(rows, begin + several)


class WrittenFile:
    """A file that is open for writing, of its full size from the start, made of a descriptor that becomes its own."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._direct = _reopened(descriptor, os.O_WRONLY)
        self._past_cache = self._direct is not None
        os.truncate(descriptor, size)

    def write(self, content: bytes | memoryview, offset: int) -> None:
        """Writes all of `content`. Raises OSError."""
        view = memoryview(content)
        begin, end = _aligned(offset, len(view))
        if self._direct is None or not self._past_cache or end - begin < _LARGE:
            _write_all(self._descriptor, view, offset)
            return
        try:
            _write_direct(self._direct, view[begin - offset : end - offset], begin)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self._past_cache = False
            _write_all(self._descriptor, view, offset)
            return
        # The blocks at both ends are shared with what stands beside it.
        _write_all(self._descriptor, view[: begin - offset], offset)
        _write_all(self._descriptor, view[end - offset :], end)

    def close(self) -> None:
        """Closes it."""
        for descriptor in filter(None, (self._descriptor, self._direct)):
            os.close(descriptor)


def read_into(path: Path, buffer: memoryview, offset: int) -> int:
    """Fills `buffer` with bytes of a file. Returns how many there were: fewer where the file ends. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    direct = _reopened(descriptor, os.O_RDONLY) if len(buffer) >= _LARGE else None
    try:
        done = 0
        for begin, end in cuts(offset, len(buffer)):
            count = _read_piece(descriptor, direct, buffer[begin:end], offset + begin)
            done += count
            if count < end - begin:
                break
        return done
    finally:
        for opened in filter(None, (descriptor, direct)):
            os.close(opened)


def _read_piece(descriptor: int, direct: int | None, buffer: memoryview, offset: int) -> int:
    """At most BUFFER bytes: from the page cache if they are there, else past it."""
    if direct is None or len(buffer) < _LARGE or _is_cached(descriptor, offset, len(buffer)):
        return _read_all(descriptor, buffer, offset)
    try:
        return _read_direct(direct, buffer, offset)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return _read_all(descriptor, buffer, offset)


def _aligned(offset: int, length: int) -> tuple[int, int]:
    """Beginning and end of the whole blocks between."""
    return -(-offset // _BLOCK) * _BLOCK, (offset + length) // _BLOCK * _BLOCK


def _reopened(descriptor: int, flags: int) -> int | None:
    """The same open file past the page cache; None where that cannot be."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (*_UNSUPPORTED, errno.ENOENT):
            raise
        return None


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(descriptor, view[:_LARGEST], offset)
        view, offset = view[written:], offset + written


def _write_direct(descriptor: int, view: memoryview, offset: int) -> None:
    """Writes whole blocks, through a buffer that lies on whole blocks in memory too."""
    source, buffer = np.frombuffer(view, np.uint8), _buffer("blocks")
    for at in range(0, len(source), BUFFER):
        piece = buffer[: min(BUFFER, len(source) - at)]
        np.copyto(piece, source[at : at + len(piece)])
        _write_all(descriptor, piece.data, offset + at)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted"))


_LIBC = ctypes.CDLL(None, use_errno=True)
_CACHESTAT = 451  # the number of cachestat(2) on every architecture, from Linux 6.5 on


def _is_cached(descriptor: int, offset: int, length: int) -> bool:
    """Whether at least half of these bytes lies in the page cache; False where the kernel does not say.

    A read that would not wait (RWF_NOWAIT) is no way to ask: where it finds nothing it has the kernel read ahead.
    """
    found = _CacheStat()
    failed = _LIBC.syscall(_CACHESTAT, descriptor, ctypes.byref(_Range(offset, length)), ctypes.byref(found), 0)
    return not failed and 2 * found.cached * mmap.PAGESIZE >= length


def _read_direct(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Reads at most BUFFER bytes past the page cache; the last bytes of a file that ends within a block are read too."""
    target, begin, done = np.frombuffer(buffer, np.uint8), offset // _BLOCK * _BLOCK, 0
    while done < len(target):
        blocks = _buffer("blocks")
        count = os.preadv(descriptor, [blocks.data[: -(-(offset + len(target) - begin) // _BLOCK) * _BLOCK]], begin)
        found = blocks[offset + done - begin : min(count, offset + len(target) - begin)]
        if not len(found):
            break
        np.copyto(target[done : done + len(found)], found)
        done += len(found)
        begin += count
        if count % _BLOCK:
            break
    return done


# A buffer a thread and use: memory that is used again costs nothing, and new memory a fault for each 4 KiB.
_of_thread = threading.local()


def _buffer(use: str) -> NDArray[np.uint8]:
    if not hasattr(_of_thread, use):
        memory = mmap.mmap(-1, BUFFER, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A disk takes a list of pieces of memory at a time: of pages of 4 KiB that is a megabyte, of huge ones all that is asked for.
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
        setattr(_of_thread, use, np.frombuffer(memory, np.uint8))
    found: NDArray[np.uint8] = getattr(_of_thread, use)
    return found


SCRATCH = 32 << 20  # bytes up to which a chunk is read as a whole, in memory that a thread keeps for that


def scratch(nbytes: int) -> Tensor:
    """Memory, uint8 [nbytes], that up to SCRATCH the next call from this thread gives again."""
    if nbytes > SCRATCH:
        return torch.empty(nbytes, dtype=torch.uint8)
    if not hasattr(_of_thread, "scratch"):
        _of_thread.scratch = torch.empty(SCRATCH, dtype=torch.uint8)
    found: Tensor = _of_thread.scratch[:nbytes]
    return found


def _read_all(descriptor: int, buffer: memoryview, offset: int) -> int:
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done : done + _LARGEST]], offset + done)
        if not count:
            break
        done += count
    return done
