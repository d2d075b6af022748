"""Bytes of files: read where they are asked for, or before. Threads may share a file.

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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ckptkit.core.extents import Place
from ckptkit.storage.buffers import BUFFER, bytes_of, copy_bytes, cuts, new_buffer, thread_buffer

_LARGEST = 1 << 30  # Linux moves at most 2 GiB a call
BLOCK = 4096  # offsets and sizes past the page cache are multiples of this
LARGE = 1 << 20  # pieces from this size on go past the page cache
ARENA = 24 << 20  # bytes that a thread holds of files
# What file systems say that have no such way: tmpfs, some network and some stacked ones.
UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


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


class _Held(threading.local):
    """What is `prefetched`: from where of a file on, and the memory that holds it."""

    def __init__(self) -> None:
        self.places: list[tuple[Path, int, Tensor]] = []


_held = _Held()


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
            arena = torch.from_numpy(thread_buffer("arena", ARENA))
            for path, low, high in runs:
                with suppress(OSError):
                    _held.places.append((path, low, arena[: _read_blocks(path, bytes_of(arena[: high - low]), low)]))
                arena = arena[high - low :]
        yield
    finally:
        _held.places = []


def held(path: Path, offset: int, nbytes: int) -> Tensor | None:
    """These bytes, uint8 [nbytes], where they are `prefetched`: those that stand side by side in a file do so in memory."""
    for file, low, memory in _held.places:
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
    return new_buffer(nbytes) if nbytes > ARENA or _held.places else thread_buffer("arena", ARENA)[:nbytes]


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


def _read_piece(
    file: _Opened, buffer: memoryview, offset: int, past_cache: Callable[[int, memoryview, int], int]
) -> int:
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
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


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


def _read_all(descriptor: int, buffer: memoryview, offset: int) -> int:
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done : done + _LARGEST]], offset + done)
        if not count:
            break
        done += count
    return done
