"""Reads bytes of files; large pieces bypass the page cache if the file system allows it (open(2), O_DIRECT).

A checkpoint is read once: caching it takes time, and displaces other cached files.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ckptkit.core.extents import ByteRange, Reader
from ckptkit.storage.buffers import BUFFER, bytes_of, cuts, new_buffer, tensor_of
from ckptkit.storage.regular import open_descriptor

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 4096  # direct I/O requires multiples of this as offsets and sizes
LARGE = 1 << 20  # least bytes of a piece for direct I/O
ARENA = 24 << 20  # bytes of memory of a FileReader
# Errors of file systems without direct I/O: tmpfs, some network and some stacked ones.
UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class InputFile:
    """A file open for reading: large pieces that are not in the page cache bypass it."""

    def __init__(self, path: Path) -> None:
        self._descriptor = open_descriptor(path)

    def __enter__(self) -> InputFile:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)
        if (direct := self.__dict__.get("_direct")) is not None:
            os.close(direct)

    @cached_property
    def _direct(self) -> int | None:
        return reopened(self._descriptor, os.O_RDONLY)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fills `buffer`. Returns the number of bytes, fewer at the end of the file. Raises OSError."""
        done = 0
        for begin, end in cuts(offset, len(buffer)):
            count = self._read_piece(buffer[begin:end], offset + begin, on_blocks=False)
            done += count
            if count < end - begin:
                break
        return done

    def read_blocks(self, memory: memoryview, offset: int) -> int:
        """Like `read_into`, for memory and an offset aligned to blocks, which avoids a copy."""
        # Pieces of about BUFFER and equal size, so that none is small.
        done, pieces = 0, max(1, round(len(memory) / BUFFER))
        piece = _up_to_block(-(-len(memory) // pieces))
        while done < len(memory):
            count = self._read_piece(memory[done : done + piece], offset + done, on_blocks=True)
            done += count
            if not count or count % BLOCK:
                break
        return done

    def _read_piece(self, buffer: memoryview, offset: int, *, on_blocks: bool) -> int:
        if len(buffer) >= LARGE and not _is_cached(self._descriptor, offset, len(buffer)) and self._direct is not None:
            try:
                return os.preadv(self._direct, [buffer], offset) if on_blocks else self._read_between(buffer, offset)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
        done = 0
        while done < len(buffer):
            count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    def _read_between(self, buffer: memoryview, offset: int) -> int:
        """Reads unaligned bytes with direct I/O through aligned memory."""
        assert self._direct is not None
        target, begin, done = np.frombuffer(buffer, np.uint8), offset // BLOCK * BLOCK, 0
        blocks = new_buffer(min(BUFFER, _up_to_block(offset + len(buffer)) - begin))
        while done < len(target):
            count = os.preadv(self._direct, [blocks.data[: _up_to_block(offset + len(target) - begin)]], begin)
            found = blocks[offset + done - begin : min(count, offset + len(target) - begin)]
            if not len(found):
                break
            np.copyto(target[done : done + len(found)], found)
            done += len(found)
            begin += count
            if count % BLOCK:
                break
        return done


def read_into(path: Path, buffer: memoryview, offset: int) -> int:
    """Fills `buffer` with bytes of a file. Returns their number, fewer at the end of the file. Raises OSError."""
    with InputFile(path) as file:
        return file.read_into(buffer, offset)


def read_new(wanted: ByteRange) -> Tensor:
    """Bytes of a file in new memory, uint8 [bytes]; fewer at the end of the file. Raises OSError."""
    nbytes = wanted.end - wanted.begin
    if nbytes < LARGE:
        import torch

        flat = torch.empty(nbytes, dtype=torch.uint8)
        return flat[: read_into(wanted.path, bytes_of(flat), wanted.begin)]
    low, high = _blocks(wanted)
    return _read_range(wanted, tensor_of(new_buffer(high - low).data))


class FileReader:
    """A `Reader` with ARENA bytes of memory, which every `load` and `read` reuses."""

    def __init__(self) -> None:
        self._loaded: list[tuple[Path, int, Tensor]] = []

    @cached_property
    def _memory(self) -> Tensor:
        return tensor_of(new_buffer(ARENA).data)

    def load(self, ranges: Iterable[ByteRange]) -> None:
        """Reads adjacent ranges in one request."""
        self._loaded = []
        runs = _runs(ranges)
        if sum(run.end - run.begin for run in runs) > ARENA:
            return
        memory = self._memory
        for run in runs:
            with suppress(OSError):
                self._loaded.append((run.path, run.begin, _read_range(run, memory)))
            memory = memory[run.end - run.begin :]

    def loaded(self, wanted: ByteRange) -> Tensor | None:
        for path, begin, memory in self._loaded:
            if begin <= wanted.begin and wanted.end <= begin + len(memory) and path == wanted.path:
                return memory[wanted.begin - begin : wanted.end - begin]
        return None

    def read(self, wanted: ByteRange) -> memoryview:
        """Reads ranges that are too large for the memory into new memory."""
        self._loaded = []
        low, high = _blocks(wanted)
        memory = self._memory if high - low <= ARENA else tensor_of(new_buffer(high - low).data)
        return bytes_of(_read_range(wanted, memory))


@dataclass(frozen=True)
class FileExtent:
    """An `Extent` that can be read in pieces."""

    path: Path
    offset: int
    nbytes: int
    crc: int | None = None

    def read(self, reader: Reader, start: int, nbytes: int) -> memoryview:
        """Raises OSError, also at the end of the file."""
        begin = self.offset + start
        found = reader.read(ByteRange(self.path, begin, begin + nbytes))
        if len(found) < nbytes:
            raise OSError(errno.EIO, "the file ends too early", str(self.path))
        return found


def _read_range(wanted: ByteRange, memory: Tensor) -> Tensor:
    """Reads the blocks of a range into aligned memory. Returns the range, shorter at the end of the file."""
    low, high = _blocks(wanted)
    with InputFile(wanted.path) as file:
        count = file.read_blocks(bytes_of(memory[: high - low]), low)
    return memory[wanted.begin - low : max(wanted.begin - low, min(count, wanted.end - low))]


def _runs(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """The blocks of these ranges, with adjacent ones joined."""
    runs: list[ByteRange] = []
    for wanted in sorted(ranges):
        low, high = _blocks(wanted)
        if runs and runs[-1].path == wanted.path and low <= runs[-1].end + BLOCK:
            low, high = runs[-1].begin, max(high, runs.pop().end)
        runs.append(ByteRange(wanted.path, low, high))
    return runs


def _blocks(wanted: ByteRange) -> tuple[int, int]:
    return wanted.begin // BLOCK * BLOCK, _up_to_block(wanted.end)


def _up_to_block(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def reopened(descriptor: int, flags: int) -> int | None:
    """The same open file for direct I/O, or None if that is not supported."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (*UNSUPPORTED, errno.ENOENT):
            raise
        return None


_LIBC = ctypes.CDLL(None, use_errno=True)
_CACHESTAT = 451  # the number of cachestat(2) on every architecture, from Linux 6.5 on


def _is_cached(descriptor: int, offset: int, length: int) -> bool:
    """Whether at least half of these bytes are cached (without cachestat: False). RWF_NOWAIT would read ahead."""
    area, pages = (ctypes.c_uint64 * 2)(offset, length), (ctypes.c_uint64 * 5)()  # cached, dirty, and other pages
    failed = _LIBC.syscall(_CACHESTAT, descriptor, ctypes.byref(area), ctypes.byref(pages), 0)
    return not failed and 2 * pages[0] * mmap.PAGESIZE >= length
