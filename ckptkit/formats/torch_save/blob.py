"""Reads one torch.save file, separate (common.pt) or inside a .distcp file.

torch.save writes an uncompressed zip: `*/data.pkl` describes the object, `*/data/0` is the raw storage of a tensor. A
zip contains the position of its directory and the names of its entries several times. If they differ, Python's zipfile
and the miniz in torch unpickle different bytes; so files with differences, which torch.save never writes, are rejected.

Source: APPNOTE.TXT of PKWARE, sections 4.3.14 to 4.3.16, 4.4.11 and 4.5.3.
"""

from __future__ import annotations

import errno
import io
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZIP_STORED, ZipInfo

from ckptkit.core.dtypes import ITEMSIZE, STORAGE_CLASS, torch_dtype
from ckptkit.core.errors import CkptkitError, DamagedError, MissingError, UnsupportedError, memory_for
from ckptkit.core.extents import ByteRange, Extent, Reader
from ckptkit.core.specs import MAX_AXES
from ckptkit.formats.torch_save import unpickle
from ckptkit.formats.torch_save.records import NotAllowed, Record, kind_of
from ckptkit.storage.buffers import bytes_of, elements, tensor_of
from ckptkit.storage.read import ARENA, BLOCK, FileExtent, read_into, read_new

if TYPE_CHECKING:
    from torch import Tensor


try:
    from zlib_ng.zlib_ng import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32


LOCAL_HEADER = 30  # bytes without name and extra field
_END, _LOCATOR, _END_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sLQL"), struct.Struct("<4sQ2H2L4Q")
END_BYTES = _END.size + _LOCATOR.size + _END_64.size
_IS_ZIP64 = b"\1\0"  # the extra field of an entry with sizes or an offset of 64 bits


def zip_problem(found: Sequence[ZipInfo], tail: bytes, length: int) -> str | None:
    """Why entries cannot be read one by one or readers may differ, or None. `tail`: the last END_BYTES bytes."""
    if any(info.compress_type != ZIP_STORED for info in found):
        return "one of its zip entries is compressed"
    directory, count = _directory(tail, length)
    if directory is None or count != len(found):
        return "the zip records at its end contradict each other, or other bytes follow them"
    return _name_problem(found) or _misplaced(found, directory)


def _directory(tail: bytes, length: int) -> tuple[int | None, int]:
    """Position of the directory, or None if the records at the end contradict, and the number of entries."""
    if len(tail) < _END.size:
        return None, 0
    mark, _, _, _, count, nbytes, begin, comment = _END.unpack(tail[-_END.size :])
    end = length - _END.size
    if mark != b"PK\5\6" or comment:
        return None, 0
    if tail[-_END.size - _LOCATOR.size :][:4] == b"PK\6\7" and len(tail) == END_BYTES:
        end -= _LOCATOR.size + _END_64.size
        _, disk, where, _ = _LOCATOR.unpack_from(tail, _END_64.size)
        mark, size, _, _, _, _, _, count, nbytes, begin = _END_64.unpack_from(tail)
        if (mark, size, disk, where) != (b"PK\6\6", _END_64.size - 12, 0, end):
            return None, 0
    return (begin if begin + nbytes == end else None), count


def _name_problem(found: Sequence[ZipInfo]) -> str | None:
    """Names that readers interpret differently: miniz does not distinguish `DATA.PKL` from `data.pkl`."""
    folder = found[0].filename.partition("/")[0] if found else ""
    for info in found:
        if info.orig_filename != info.filename or not info.filename.isascii():
            return f"entry {info.orig_filename!r:.80} has a name that zip readers interpret differently"
        if not info.filename.startswith(f"{folder}/"):
            return f"entry {info.filename!r:.80} is in another folder than the first"
        is_zip64 = info.extra[:2] == _IS_ZIP64 and len(info.extra) == 4 + int.from_bytes(info.extra[2:4], "little")
        if info.extra and not is_zip64:
            return f"entry {info.filename!r:.80} has fields that torch.save does not write"
    return "two zip entries have one name" if len({info.filename.lower() for info in found}) < len(found) else None


def _misplaced(found: Sequence[ZipInfo], directory: int) -> str | None:
    end = 0
    if found and min(info.header_offset for info in found):
        return "its first zip entry is not at its start"
    for info in sorted(found, key=attrgetter("header_offset")):
        if info.header_offset < end:
            return f"entry {info.filename!r:.80} overlaps another"
        end = info.header_offset + LOCAL_HEADER + info.file_size
    return "a zip entry is longer than the file" if end > directory else None


_MAX_NUMBER = 1 << 60  # of an offset, an axis or a stride, in elements
_MAX_READ = 1 << 28  # bytes of an entry in memory: a pickle of a trainer's state
_MAX_DIRECTORY = 1 << 24  # bytes of a zip's directory: 10^5 storages
AT_ONCE = ARENA - 2 * BLOCK  # most bytes of a chunk that is read at once


@dataclass(frozen=True, slots=True)
class Blob:
    """`length` bytes from `offset` of `path`, written by torch.save; `content`: these bytes, if already read."""

    path: Path
    offset: int
    length: int
    content: memoryview | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.path} at byte {self.offset}"

    def object(self, allowed: Callable[[str], bool] | None = None) -> Any:
        """The saved object, with Records for other than plain data. Raises CkptkitError, also for a disallowed name."""
        return self._pickled(self.entries(), allowed)

    @property
    def byte_range(self) -> ByteRange:
        """The position in the file."""
        return ByteRange(self.path, self.offset, self.offset + self.length)

    def tensor(self, dtype: str, shape: tuple[int, ...], reader: Reader | None = None) -> Tensor:
        """Reads the saved tensor, through `reader`. Raises CkptkitError unless it is dense and fits the arguments."""
        loaded = reader.loaded(self.byte_range) if reader else None
        return self.tensor_in(bytes_of(self._read() if loaded is None else loaded), dtype, shape)

    def _read(self) -> Tensor:
        try:
            # The length is from the metadata: allocate at most the bytes of the file.
            nbytes = max(0, min(self.length, self.path.stat().st_size - self.offset))
            return read_new(ByteRange(self.path, self.offset, self.offset + nbytes))
        except OSError as error:
            raise self.unreadable(error) from error

    def unreadable(self, error: Exception) -> CkptkitError:
        """The error for an unreadable file."""
        if not self.path.exists():
            return MissingError(f"{self.path} is missing", "copy it again from the save")
        return CkptkitError(f"{self}: {error}", "copy the file again: it is missing or damaged")

    def tensor_in(self, memory: memoryview, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """Like `tensor`, from all bytes of the blob: the tensor's description is at both ends."""
        loaded = replace(self, content=memory)
        info, stride, offset = loaded._describe(loaded.entries(), dtype, shape)
        begin = loaded._begin(info)
        content = memory[begin : begin + info.file_size]
        if len(content) != info.file_size:
            raise self._too_short()
        self.check(info, crc32(content))
        # torch.save aligns storages to 64 bytes, but other programs may not.
        flat = elements(tensor_of(memory)[begin : begin + info.file_size], torch_dtype(dtype))
        return flat.as_strided(shape, stride, flat.storage_offset() + offset).contiguous()

    def read(self, buffer: memoryview, start: int) -> int:
        """Fills `buffer` from `start`. Returns the number of bytes. Raises CkptkitError, naming the file."""
        if self.content is None:
            try:
                return read_into(self.path, buffer, self.offset + start)
            except OSError as error:
                raise self.unreadable(error) from error
        piece = self.content[start : start + len(buffer)]
        buffer[: len(piece)] = piece
        return len(piece)

    def extent(self, dtype: str, shape: tuple[int, ...]) -> Extent | None:
        """The position of the saved tensor's bytes, or None if not row by row. Raises CkptkitError like `tensor`.

        A small blob is only parsed when it is read: one read gets the description, which is at both ends, and the data.
        """
        return _BlobExtent(self, dtype, shape) if self.length <= AT_ONCE else self.dense(dtype, shape)

    def dense(self, dtype: str, shape: tuple[int, ...]) -> FileExtent | None:
        """Like `extent`, but always parses the description of the saved tensor."""
        info, stride, offset = self._describe(self.entries(), dtype, shape)
        nbytes = math.prod(shape) * ITEMSIZE[dtype]
        if offset or stride != dense_stride(shape) or info.file_size != nbytes:
            return None
        # torch can omit the checksum, and then writes zero.
        return FileExtent(self.path, self.offset + self._begin(info), info.file_size, info.CRC or None)

    def _describe(
        self, entries: Mapping[str, zipfile.ZipInfo], dtype: str, shape: tuple[int, ...]
    ) -> tuple[zipfile.ZipInfo, tuple[int, ...], int]:
        """The entry of a tensor's storage, and the tensor's stride and offset in it, in elements."""
        content = self._pickled(entries)
        arguments = content.args if isinstance(content, Record) else ()
        if len(arguments) < 4 or not isinstance(arguments[0], tuple) or len(arguments[0]) < 5:
            raise DamagedError(f"{self} is not a plain tensor", "copy or save it again: torch.save did not write it")
        storage, offset, size, stride = arguments[:4]
        if not is_layout(offset, size, stride) or type(storage[2]) is not str or type(storage[4]) is not int:
            raise DamagedError(f"{self}: its tensor has an invalid shape, stride, offset or storage")
        kind = kind_of(storage[1]).rpartition(".")[2]
        if kind != STORAGE_CLASS.get(dtype) or size != shape:
            message = f"{self} contains {list(size)} {kind}, but the metadata has {list(shape)} {dtype}"
            raise DamagedError(message, "copy the checkpoint again: it is damaged")
        info = self.entry(entries, f"data/{storage[2]}")
        if info.file_size != storage[4] * ITEMSIZE[dtype]:
            raise DamagedError(f"{self}: its storage has {info.file_size} bytes, not {storage[4] * ITEMSIZE[dtype]}")
        if offset + reach(size, stride) > storage[4]:
            raise DamagedError(f"{self}: its tensor exceeds the storage of {info.file_size} bytes")
        return info, stride, offset

    def entries(self) -> dict[str, zipfile.ZipInfo]:
        """The zip's entries by name without the leading folder. Raises CkptkitError like `zip_problem`."""
        try:
            with zipfile.ZipFile(_Stream(self)) as archive:
                found = archive.infolist()
        except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise self.unreadable(error) from error
        tail = bytearray(min(END_BYTES, self.length))
        self.read(memoryview(tail), self.length - len(tail))
        if problem := zip_problem(found, bytes(tail), self.length):
            raise DamagedError(f"{self}: {problem}", "copy the file again: it is damaged, or not by torch.save")
        return {info.filename.partition("/")[2]: info for info in found}

    def entry(self, entries: Mapping[str, zipfile.ZipInfo], name: str) -> zipfile.ZipInfo:
        """One of `entries`. Raises CkptkitError if it is missing."""
        if name not in entries:
            raise DamagedError(f"{self} has no zip entry {name}", "copy or save it again: torch.save did not write it")
        return entries[name]

    def read_into(self, info: zipfile.ZipInfo, buffer: memoryview, start: int = 0) -> None:
        """Fills `buffer` with an entry's content from `start`; verifies the checksum of a complete entry."""
        if self.read(buffer, self._begin(info) + start) != buffer.nbytes:
            raise self._too_short()
        if buffer.nbytes == info.file_size:
            self.check(info, crc32(buffer))

    def _begin(self, info: zipfile.ZipInfo) -> int:
        lengths, header = bytearray(4), info.header_offset
        self.read(memoryview(lengths), header + 26)  # of name and extra field, in a local header of the zip
        return header + LOCAL_HEADER + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")

    def _too_short(self) -> CkptkitError:
        return CkptkitError(f"{self} ends too early", "copy the file again: it is truncated")

    def check(self, info: zipfile.ZipInfo, checksum: int) -> None:
        """Raises CkptkitError if this differs from the CRC-32 of an entry."""
        if info.CRC and checksum != info.CRC:
            hint = "copy the file again: it was damaged after it was written"
            raise DamagedError(f"{self}: its bytes do not match their checksum", hint)

    def _pickled(self, entries: Mapping[str, zipfile.ZipInfo], allowed: Callable[[str], bool] | None = None) -> Any:
        if "byteorder" in entries and self._bytes(entries, "byteorder") != b"little":
            raise CkptkitError(f"{self} has big-endian numbers", "save it on a little-endian machine")
        try:
            with memory_for(self):
                return unpickle.loads(self._bytes(entries, "data.pkl"), allowed)
        except NotAllowed as error:
            hint = "if you trust the file, load it and save it again without this (ckptkit ran none of its code)"
            raise UnsupportedError(f"{self.path} contains {error.kind}, which is not plain data", hint) from error
        except pickle.UnpicklingError as error:
            raise DamagedError(f"{self} cannot be unpickled: {error}") from error

    def _bytes(self, entries: Mapping[str, zipfile.ZipInfo], name: str) -> bytes:
        info = self.entry(entries, name)
        if info.file_size > _MAX_READ:
            raise CkptkitError(f"{self}: {name} has {info.file_size} bytes", f"ckptkit reads at most {_MAX_READ}")
        content = bytearray(info.file_size)
        self.read_into(info, memoryview(content))
        return bytes(content)


def is_layout(offset: object, shape: object, stride: object) -> bool:
    """Whether these are a valid layout of a tensor in its storage: integers, and a stride for each axis."""
    if type(shape) is not tuple or type(stride) is not tuple or not len(shape) == len(stride) <= MAX_AXES:
        return False
    return all(type(number) is int and 0 <= number <= _MAX_NUMBER for number in (offset, *shape, *stride))


def reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of the storage from the first to the last one of a tensor, or 0 for an empty one."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if math.prod(shape) else 0


def dense_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """torch's strides of a contiguous tensor."""
    return tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))


class _BlobExtent:
    """The bytes of a saved tensor, which is completely read and checked with the first bytes."""

    crc = None

    def __init__(self, blob: Blob, dtype: str, shape: tuple[int, ...]) -> None:
        self.path, self.nbytes = blob.path, math.prod(shape) * ITEMSIZE[dtype]
        self._blob, self._dtype, self._shape = blob, dtype, shape
        self._content = memoryview(b"")

    def read(self, reader: Reader, start: int, nbytes: int) -> memoryview:
        """Raises CkptkitError like `Blob.tensor`."""
        if not start:
            try:
                memory = reader.read(self._blob.byte_range)
            except OSError as error:
                raise self._blob.unreadable(error) from error
            self._content = bytes_of(self._blob.tensor_in(memory, self._dtype, self._shape))
        return self._content[start : start + nbytes]


class _Stream(io.RawIOBase):
    """A blob as a file."""

    def __init__(self, blob: Blob) -> None:
        self._blob, self._at = blob, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._blob.length}[whence]
        if base + position < 0:
            raise OSError(errno.EINVAL, f"cannot seek to byte {base + position} of {self._blob}")
        self._at = base + position
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Raises OSError for more bytes than the limit for a zip's directory."""
        if size > _MAX_DIRECTORY:
            raise OSError(errno.EFBIG, f"its zip directory has {size} bytes")
        return super().read(size) or b""

    def readinto(self, buffer: Any) -> int:
        count = self._blob.read(memoryview(buffer)[: max(0, self._blob.length - self._at)], self._at)
        self._at += count
        return count
