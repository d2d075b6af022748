"""Writes files: small ones atomically, even if the machine crashes, and large ones by regions.

Threads fill regions of BUFFER bytes, and the thread that completes one writes it, because disks are fastest with large
requests. Direct I/O (`ckptkit.storage.read`) also requires alignment to blocks, which tensors do not have.
"""

from __future__ import annotations

import os
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ckptkit.storage.buffers import BUFFER, copy_bytes, cuts, new_buffer
from ckptkit.storage.read import BLOCK, LARGE, UNSUPPORTED, reopened

# Limit of open regions, and additional ones per thread: matrices of a dense layer, cut by columns, fill 20 at a time.
_OPEN, _OF_THREAD = 24, 2


@dataclass
class _Region:
    """BUFFER bytes of a file from `begin` on. `filled`, `count`: bytes so far. `users`: copying threads."""

    file: WrittenFile
    begin: int
    memory: NDArray[np.uint8]
    filled: list[tuple[int, int]] = field(default_factory=list)
    count: int = 0
    users: int = 0

    @property
    def is_complete(self) -> bool:
        return self.count == min(BUFFER, self.file.size - self.begin)

    def write(self) -> None:
        runs: list[tuple[int, int]] = []
        for begin, end in sorted(self.filled):
            runs.append((runs.pop()[0] if runs and runs[-1][1] == begin else begin, end))
        for begin, end in runs:
            self.file.write_run(self.memory[begin:end].data, self.begin + begin)


class Regions:
    """Unwritten regions of several files, shared by threads."""

    def __init__(self) -> None:
        self._open: dict[tuple[WrittenFile, int], _Region] = {}
        self._free: list[NDArray[np.uint8]] = []
        self._threads: set[int] = set()
        # Files with an incomplete region that a thread is writing to free memory.
        self._early: list[WrittenFile] = []
        self._changed = threading.Condition()

    def put(self, file: WrittenFile, piece: memoryview, offset: int) -> None:
        """Adds bytes of one region. Raises OSError, also for errors of writing other regions."""
        key = file, offset // BUFFER
        with self._changed:
            self._threads.add(threading.get_ident())
            early = None
            if key not in self._open:
                early = self._take_early()
                memory = self._free.pop() if self._free else new_buffer(BUFFER)
                self._open[key] = _Region(file, key[1] * BUFFER, memory)
            region = self._open[key]
            region.users += 1
        if early is not None:
            self._write_early(early)
        begin = offset - region.begin
        copy_bytes(region.memory[begin : begin + len(piece)].data, piece)
        with self._changed:
            region.users -= 1
            region.filled.append((begin, begin + len(piece)))
            region.count += len(piece)
            if region.is_complete:
                del self._open[key]
        if region.is_complete:
            self._write(region)

    def finish(self, file: WrittenFile) -> None:
        """Writes the remaining regions of a file. Raises OSError."""
        with self._changed:
            self._changed.wait_for(lambda: file not in self._early)
            left = [self._open.pop(key) for key in list(self._open) if key[0] is file]
        for region in left:
            self._write(region)

    def _take_early(self) -> _Region | None:
        """Removes and returns the oldest region if there are too many."""
        key = next((key for key, region in self._open.items() if not region.users), None)
        if key is None or len(self._open) < _OPEN + _OF_THREAD * len(self._threads):
            return None
        self._early.append(key[0])
        return self._open.pop(key)

    def _write_early(self, region: _Region) -> None:
        try:
            self._write(region)
        finally:
            with self._changed:
                self._early.remove(region.file)
                self._changed.notify_all()

    def _write(self, region: _Region) -> None:
        region.write()
        with self._changed:
            self._free.append(region.memory)


class WrittenFile:
    """A file open for writing, with its full size from the start. Closes `descriptor`."""

    def __init__(self, descriptor: int, size: int, regions: Regions) -> None:
        self.size = size
        self._descriptor, self._regions = descriptor, regions
        self._direct = reopened(descriptor, os.O_WRONLY)
        os.truncate(descriptor, size)

    def write(self, content: bytes | memoryview, offset: int) -> None:
        """Writes `content`, at the latest in `close`. Raises OSError."""
        view = memoryview(content)
        for begin, end in cuts(offset, len(view)):
            self._regions.put(self, view[begin:end], offset + begin)

    def close(self) -> None:
        """Writes the remaining bytes, and closes the file. Raises OSError."""
        try:
            self._regions.finish(self)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Closes the file without writing the remaining bytes."""
        for descriptor in filter(None, (self._descriptor, self._direct)):
            os.close(descriptor)

    def write_run(self, view: memoryview, offset: int) -> None:
        """Writes memory with the same alignment to blocks as in the file. Raises OSError."""
        begin, end = -(-offset // BLOCK) * BLOCK, (offset + len(view)) // BLOCK * BLOCK
        if self._direct is None or end - begin < LARGE:
            _write_all(self._descriptor, view, offset)
            return
        try:
            _write_all(self._direct, view[begin - offset : end - offset], begin)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            _write_all(self._descriptor, view, offset)
            return
        _write_all(self._descriptor, view[: begin - offset], offset)
        _write_all(self._descriptor, view[end - offset :], end)


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


_AT_ONCE = 16  # file systems combine concurrent flushes


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces `path`, or a link there, by `content` (text in UTF-8) completely or not at all. Raises OSError."""
    descriptor, name = new_file(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            # Half of a surrogate pair, possible in a file's name, is not UTF-8.
            file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
            file.flush()
            os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def new_file(path: Path) -> tuple[int, Path]:
    """Opens a new file next to `path`, with a unique name and default permissions. Returns both. Raises OSError."""
    name = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), name


def sync_tree(root: Path) -> None:
    """Waits until every file below `root`, and its name, is on the disk. Raises OSError for failed writes."""

    def sync(path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def fail(error: OSError) -> None:
        raise error

    paths = [os.path.join(folder, name) for folder, _, files in os.walk(root, onerror=fail) for name in [*files, "."]]
    with ThreadPoolExecutor(_AT_ONCE, "ckptkit-sync") as pool:
        list(pool.map(sync, paths))
