"""The bytes of tensors: seen without a copy, and read from places in files. Threads may share a file.

Large pieces are read past the page cache where the file system allows it (open(2), O_DIRECT): a checkpoint is read once, and to keep
what nobody will ask for again costs the kernel a page of memory for each 4 KiB, and the machine what it had cached before.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LARGEST = 1 << 30  # Linux moves at most 2 GiB a call
BLOCK = 4096  # offsets and sizes past the page cache are multiples of this
LARGE = 1 << 20  # pieces from this size on go past the page cache
BUFFER = 8 << 20  # what a disk is asked for at once: with less it is slower, with more no faster
ARENA = 24 << 20  # bytes that a thread holds of files
# What file systems say that have no such way: tmpfs, some network and some stacked ones.
UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)

# Bytes of a file, from the one to before the other.
Place = tuple[Path, int, int]


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

    def view(self, start: int, nbytes: int) -> memoryview:
        """So many bytes from `start`, which is where the last call ended, until anything else is read by this thread. Raises OSError and CkptkitError."""


@dataclass(frozen=True)
class FileExtent:
    """Bytes that can be read piece by piece; and the CRC-32 that they were written with, if one was."""

    path: Path
    offset: int
    nbytes: int
    crc: int | None = None

    def view(self, start: int, nbytes: int) -> memoryview:
        """So many bytes from `start`, until anything else is read by this thread. Raises OSError, also where the file ends."""
        return view(self.path, self.offset + start, nbytes)


def tensor_of(content: memoryview) -> Tensor:
    """Memory as uint8 [bytes]; a tensor of all of it shares it."""
    return torch.from_numpy(np.frombuffer(content, np.uint8))


def elements(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """What bytes, uint8 [bytes], are as elements, [elements]: in the same memory, unless they begin where no such element may."""
    return (flat.clone() if flat.storage_offset() % dtype.itemsize else flat).view(dtype)


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


@contextmanager
def prefetched(places: Iterable[Place]) -> Iterator[None]:
    """In the block, this thread finds these bytes in memory: they are read before, those that touch in one go. Where ARENA is too small, none are.

    What cannot be read is not there: to read it then is an error, which says what it belongs to.
    """
    runs: list[Place] = []
    for path, begin, end in sorted(places):
        low, high = _blocks(begin, end)
        if runs and runs[-1][0] == path and low <= runs[-1][2] + BLOCK:
            low, high = runs[-1][1], max(high, runs.pop()[2])
        runs.append((path, low, high))
    try:
        if sum(high - low for _, low, high in runs) <= ARENA:
            arena = torch.from_numpy(_buffer("arena", ARENA))
            for path, low, high in runs:
                with suppress(OSError):
                    _of_thread.held.append((path, low, arena[: _read_blocks(path, bytes_of(arena[: high - low]), low)]))
                arena = arena[high - low :]
        yield
    finally:
        _of_thread.held = []


def held(path: Path, offset: int, nbytes: int) -> Tensor | None:
    """These bytes, uint8 [nbytes], where they are `prefetched`: those that stand side by side in a file do so in memory."""
    for file, low, memory in _of_thread.held:
        if low <= offset and offset + nbytes <= low + len(memory) and file == path:
            return memory[offset - low : offset - low + nbytes]
    return None


def view(path: Path, offset: int, nbytes: int) -> memoryview:
    """Bytes of a file, until anything else is read by this thread. Raises OSError, also where the file ends."""
    if (found := held(path, offset, nbytes)) is not None:
        return bytes_of(found)
    low, high = _blocks(offset, offset + nbytes)
    memory = _arena(high - low).data
    count = _read_blocks(path, memory, low)
    if count < offset + nbytes - low:
        raise OSError(errno.EIO, "the file ends too early", str(path))
    return memory[offset - low : offset - low + nbytes]


def _arena(nbytes: int) -> NDArray[np.uint8]:
    """Memory to read into: the arena, unless that holds what is `prefetched` or is too small."""
    return new_buffer(nbytes) if nbytes > ARENA or _of_thread.held else _buffer("arena", ARENA)[:nbytes]


def read_into(path: Path, buffer: memoryview, offset: int) -> int:
    """Fills `buffer` with bytes of a file. Returns how many there were: fewer where the file ends. Raises OSError."""
    if (found := held(path, offset, len(buffer))) is not None:
        copy_bytes(buffer, bytes_of(found))
        return len(buffer)
    with _opened(path, len(buffer)) as file:
        done = 0
        for begin, end in cuts(offset, len(buffer)):
            count = _read_piece(file, buffer[begin:end], offset + begin, _read_direct)
            done += count
            if count < end - begin:
                break
        return done


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copies bytes, of which there are as many on both sides. Other threads run meanwhile."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _blocks(begin: int, end: int) -> tuple[int, int]:
    """Beginning and end of the blocks that hold all between."""
    return begin // BLOCK * BLOCK, -(-end // BLOCK) * BLOCK


def _read_blocks(path: Path, memory: memoryview, offset: int) -> int:
    """Fills memory that lies on whole blocks with blocks of a file. Returns how many bytes there were. Raises OSError."""
    with _opened(path, len(memory)) as file:
        # Of about BUFFER, and alike, so that none is small.
        done, pieces = 0, max(1, round(len(memory) / BUFFER))
        _, piece = _blocks(0, -(-len(memory) // pieces))
        while done < len(memory):
            count = _read_piece(file, memory[done : done + piece], offset + done, _read_aligned)
            done += count
            if not count or count % BLOCK:
                break
        return done


# A descriptor, and one past the page cache or None.
_Opened = tuple[int, int | None]


@contextmanager
def _opened(path: Path, nbytes: int) -> Iterator[_Opened]:
    """A file to read so many bytes from."""
    descriptor = os.open(path, os.O_RDONLY)
    direct = reopened(descriptor, os.O_RDONLY) if nbytes >= LARGE else None
    try:
        yield descriptor, direct
    finally:
        for opened in filter(None, (descriptor, direct)):
            os.close(opened)


def _read_piece(file: _Opened, buffer: memoryview, offset: int, past_cache: Callable[[int, memoryview, int], int]) -> int:
    """At most BUFFER bytes: from the page cache if they are there, else past it."""
    descriptor, direct = file
    if direct is None or len(buffer) < LARGE or _is_cached(descriptor, offset, len(buffer)):
        return _read_all(descriptor, buffer, offset)
    try:
        return past_cache(direct, buffer, offset)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return _read_all(descriptor, buffer, offset)


def reopened(descriptor: int, flags: int) -> int | None:
    """The same open file past the page cache; None where that cannot be."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (*UNSUPPORTED, errno.ENOENT):
            raise
        return None


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
    target, begin, done = np.frombuffer(buffer, np.uint8), offset // BLOCK * BLOCK, 0
    blocks = _arena(BUFFER)
    while done < len(target):
        count = os.preadv(descriptor, [blocks.data[: -(-(offset + len(target) - begin) // BLOCK) * BLOCK]], begin)
        found = blocks[offset + done - begin : min(count, offset + len(target) - begin)]
        if not len(found):
            break
        np.copyto(target[done : done + len(found)], found)
        done += len(found)
        begin += count
        if count % BLOCK:
            break
    return done


def _read_aligned(descriptor: int, memory: memoryview, offset: int) -> int:
    """Reads blocks past the page cache, straight to where they are wanted."""
    return os.preadv(descriptor, [memory], offset)


def new_buffer(nbytes: int) -> NDArray[np.uint8]:
    """Memory on whole blocks, for a disk to read into and write from."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A disk takes a list of pieces of memory at a time: of pages of 4 KiB that is a megabyte, of huge ones all that is asked for.
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class _OfThread(threading.local):
    """A buffer for each use: memory that is used again costs nothing, and new memory a fault for each 4 KiB. And what is `prefetched`."""

    def __init__(self) -> None:
        self.buffers: dict[str, NDArray[np.uint8]] = {}
        self.held: list[tuple[Path, int, Tensor]] = []


_of_thread = _OfThread()


def _buffer(use: str, nbytes: int = BUFFER) -> NDArray[np.uint8]:
    if use not in _of_thread.buffers:
        _of_thread.buffers[use] = new_buffer(nbytes)
    return _of_thread.buffers[use]


def _read_all(descriptor: int, buffer: memoryview, offset: int) -> int:
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done : done + _LARGEST]], offset + done)
        if not count:
            break
        done += count
    return done
