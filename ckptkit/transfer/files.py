"""Writes a checkpoint as a set of files, each of which gets its name when it is complete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3
from zlib_ng import zlib_ng

from ckptkit.core.errors import CkptkitError, DamagedError
from ckptkit.core.extents import Extent, Reader
from ckptkit.core.specs import TensorSpec, summarize
from ckptkit.formats.files import Digests, Files, Piece
from ckptkit.storage.buffers import BUFFER, bytes_of, copy_bytes, new_buffer
from ckptkit.storage.digest import TensorDigest
from ckptkit.storage.write import Regions, WrittenFile, new_file

if TYPE_CHECKING:
    from torch import Tensor


class FilesWriter:
    """A CheckpointWriter of these files, or `only` of some of them, which do not include index, metadata or tracker.

    Any thread can write tensors, each once and in any order. A file has a temporary name until it is complete; then the
    thread that wrote its last tensor calls `complete` with the file and the digests of its tensors. `may_name` is
    called before a file is renamed, and raises if `root` no longer belongs to this writer.
    """

    def __init__(
        self,
        root: Path,
        files: Files,
        only: Collection[str] | None = None,
        complete: Callable[[str, Digests], None] = lambda file, digests: None,
        may_name: Callable[[], None] = lambda: None,
    ) -> None:
        self._root, self._files, self._all = root, files, only is None
        self._complete, self._may_name = complete, may_name
        self._left = {file: set(names) for file, names in files.names.items() if only is None or file in only}
        self._file_of = {name: file for file, names in self._left.items() for name in names}
        self._waiting = set(self._file_of)
        self._open: dict[str, tuple[WrittenFile, Path]] = {}
        self._regions = Regions()
        self._lock = threading.Lock()
        self.digests: dict[str, TensorDigest] = {}

    def write(self, name: str, tensor: Tensor) -> None:
        fits = TensorSpec.of(name, tensor) == self._files.specs[name]
        file = self._file_for(name, fits, f"{list(tensor.shape)} {tensor.dtype}")
        view = bytes_of(tensor.contiguous())
        self._put(name, file, lambda begin, end: view[begin:end], lambda: None)

    def write_extents(self, name: str, extents: Sequence[Extent], reader: Reader) -> None:
        """Stores a tensor from extents of files in pieces; the last extent may be longer."""
        nbytes = sum(extent.nbytes for extent in extents)
        file = self._file_for(name, nbytes >= self._files.specs[name].nbytes, f"{nbytes} bytes")
        stream = Stream(name, extents, reader)
        self._put(name, file, stream.piece, stream.finish)

    def _file_for(self, name: str, fits: bool, shown: str) -> WrittenFile:
        """The file for a tensor. Raises CkptkitError unless it `fits` its spec and is written only once."""
        with self._lock:
            if name not in self._waiting or not fits:
                raise CkptkitError(f"{self._files.specs[name]} cannot be written as {shown}, or is written twice")
            self._waiting.remove(name)
            return self._opened(self._file_of[name])

    def _put(self, name: str, file: WrittenFile, piece: Piece, finish: Callable[[], None]) -> None:
        digest = blake3()

        def digested(begin: int, end: int) -> memoryview:
            content = piece(begin, end)
            digest.update(content)
            return content

        self._files.put(name, file, digested)
        finish()
        spec = self._files.specs[name]
        self._written(name, TensorDigest(spec.dtype, spec.shape, digest.hexdigest()))

    def _opened(self, file: str) -> WrittenFile:
        """An open file, created with its first tensor under a unique name, because several processes may write it."""
        if file not in self._open:
            path = self._root / file
            # Not the root: if it is missing, the output is complete, and this process was assumed dead.
            path.parent.mkdir(exist_ok=True)
            descriptor, temporary = new_file(path)
            self._open[file] = WrittenFile(descriptor, self._files.size(file), self._regions), temporary
            offset, content = self._files.extra_bytes(file)
            self._open[file][0].write(content, offset)
        return self._open[file][0]

    def _written(self, name: str, digest: TensorDigest) -> None:
        file = self._file_of[name]
        with self._lock:
            self.digests[name] = digest
            self._left[file].remove(name)
            if self._left[file]:
                return
            written, made = self._open.pop(file)
        try:
            written.close()
            self._may_name()
            made = made.rename(self._root / file)
            self._complete(file, {name: self.digests[name] for name in self._files.names[file]})
        except BaseException:
            # A complete file without a record would be written again.
            made.unlink(missing_ok=True)
            raise

    def finish(self) -> None:
        if self._waiting:
            missing = f"{len(self._waiting)} tensor(s) were never written: {summarize(sorted(self._waiting))}"
            raise CkptkitError(f"{self._root}: {missing}")
        if self._all:
            self._files.finish(self._root)

    def discard(self) -> None:
        for written, temporary in self._open.values():
            written.abandon()
            temporary.unlink(missing_ok=True)
        self._open = {}


class Stream:
    """Reads the bytes of a tensor from extents of files, in order."""

    def __init__(self, name: str, extents: Sequence[Extent], reader: Reader) -> None:
        self._name, self._left, self._reader = name, list(reversed(extents)), reader
        self._at, self._crc = 0, 0

    @cached_property
    def _buffer(self) -> memoryview:
        return new_buffer(BUFFER).data

    def piece(self, begin: int, end: int) -> memoryview:
        """The next bytes, valid until the next call. Raises OSError, and CkptkitError for a wrong checksum."""
        part = self._next(end - begin)
        if len(part) == end - begin:
            return part
        piece, done = self._buffer[: end - begin] if end - begin <= BUFFER else memoryview(bytearray(end - begin)), 0
        while part:
            copy_bytes(piece[done : done + len(part)], part)
            done += len(part)
            part = self._next(len(piece) - done) if done < len(piece) else memoryview(b"")
        return piece

    def finish(self) -> None:
        """Reads the rest of the last extent for its checksum. Raises like `piece`."""
        while self._left:
            self._next(BUFFER)

    def _next(self, most: int) -> memoryview:
        """The next bytes of one extent, at most `most`."""
        extent = self._left[-1]
        part = extent.read(self._reader, self._at, min(most, extent.nbytes - self._at))
        self._at += len(part)
        self._crc = zlib_ng.crc32(part, self._crc) if extent.crc is not None else 0
        if self._at == extent.nbytes:
            if extent.crc is not None and self._crc != extent.crc:
                hint = "copy the file again: it was damaged after it was written"
                raise DamagedError(f"{extent.path}: the bytes of {self._name} do not match their checksum", hint)
            self._left.pop()
            self._at, self._crc = 0, 0
        return part
