"""Writes dense tensors in the format of torch.save, with sizes known in advance, so that a file can contain many.

The format is an uncompressed zip: `archive/data.pkl` describes the tensor; `archive/data/0` is its storage, aligned to
64 bytes by padding. Sizes are always in the 64 bit fields, like in torch. Sources: `torch/serialization.py` for entries
and pickle; PKWARE's APPNOTE.TXT for the zip, sections 4.3.7 (local header), 4.3.12 (central directory) and 4.3.14 to
4.3.16 (its end).
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckptkit.core.dtypes import ITEMSIZE, STORAGE_CLASS
from ckptkit.formats.torch_save.blob import crc32, dense_stride
from ckptkit.storage.buffers import cuts
from ckptkit.storage.write import WrittenFile

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_SIZES64 = struct.Struct("<2H2Q")  # extra field 1: both sizes of an entry
_PADDING = struct.Struct("<2s1H")  # torch's extra field for alignment
_VERSION, _NEW_YEAR_1980, _IN_64, _MAX_32, _MAX_16 = 45, 0x21, 1, 0xFFFFFFFF, 0xFFFF
_ALIGNMENT = 64


@dataclass(frozen=True)
class _Entry:
    """A file of the zip: name, position of its local header, size, and bytes of padding before its content."""

    name: bytes
    offset: int
    size: int
    padding: int = 0

    @property
    def extra(self) -> bytes:
        sizes = _SIZES64.pack(_IN_64, 16, self.size, self.size)
        return sizes + _PADDING.pack(b"FB", self.padding) + bytes(self.padding)

    @property
    def begin(self) -> int:
        return self.offset + _LOCAL.size + len(self.name) + len(self.extra)

    @property
    def end(self) -> int:
        return self.begin + self.size

    def local(self, crc: int) -> bytes:
        sizes = crc, _MAX_32, _MAX_32, len(self.name), len(self.extra)
        return _LOCAL.pack(b"PK\3\4", _VERSION, 0, 0, 0, _NEW_YEAR_1980, *sizes) + self.name + self.extra

    def central(self, crc: int) -> bytes:
        extra = _SIZES64.pack(_IN_64, 16, self.size, self.size)
        start = b"PK\1\2", _VERSION, _VERSION, 0, 0, 0, _NEW_YEAR_1980
        sizes = crc, _MAX_32, _MAX_32, len(self.name), len(extra)
        return _CENTRAL.pack(*start, *sizes, 0, 0, 0, 0, self.offset) + self.name + extra


@dataclass(frozen=True)
class SavedLayout:
    """The stored form of a tensor with a shape and dtype: a header, its data, a trailer."""

    small: tuple[tuple[_Entry, bytes], ...]
    data: _Entry

    @classmethod
    def of(cls, shape: Sequence[int], dtype: str) -> SavedLayout:
        """The layout. Raises KeyError for a dtype without a storage class in torch.save."""
        description = io.BytesIO()
        _Pickler(description, protocol=2).dump(_Description(tuple(shape), dtype))
        small: list[tuple[_Entry, bytes]] = []
        contents = {b"data.pkl": description.getvalue(), b"byteorder": b"little", b"version": b"3\n"}
        for name, content in contents.items():
            small.append((_Entry(b"archive/" + name, small[-1][0].end if small else 0, len(content)), content))
        nbytes = math.prod(shape) * ITEMSIZE[dtype]
        bare = _Entry(b"archive/data/0", small[-1][0].end, nbytes)
        return cls(tuple(small), _Entry(bare.name, bare.offset, nbytes, -bare.begin % _ALIGNMENT))

    @cached_property
    def size(self) -> int:
        return self.data.end + len(self.trailer(0))

    def write(self, file: WrittenFile, offset: int, piece: Callable[[int, int], memoryview]) -> None:
        """Writes a tensor to `offset` of a file; `piece(begin, end)` returns its bytes, in order. Raises OSError."""
        tensor = SavedTensor(self, file, offset)
        for begin, end in cuts(offset + self.data.begin, self.data.size):
            tensor.append(piece(begin, end))
        tensor.finish()

    def header(self, crc: int) -> bytes:
        """The bytes before data with this CRC-32: local headers of the zip, and small files."""
        return b"".join(entry.local(crc32(content)) + content for entry, content in self.small) + self.data.local(crc)

    def trailer(self, crc: int) -> bytes:
        """The bytes after data with this CRC-32: the directory of the zip."""
        directory = b"".join(entry.central(crc32(content)) for entry, content in self.small) + self.data.central(crc)
        count, size, begin = len(self.small) + 1, len(directory), self.data.end
        end64 = _END64.pack(b"PK\6\6", _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, size, begin)
        locator = _LOCATOR.pack(b"PK\6\7", 0, begin + size, 1)
        return directory + end64 + locator + _END.pack(b"PK\5\6", 0, 0, _MAX_16, _MAX_16, _MAX_32, _MAX_32, 0)


class SavedTensor:
    """Writes a tensor to `offset` of an open file, with its bytes in order."""

    def __init__(self, layout: SavedLayout, file: WrittenFile, offset: int) -> None:
        self._layout, self._file, self._offset = layout, file, offset
        self._at, self._crc = offset + layout.data.begin, 0

    def append(self, content: memoryview) -> None:
        """Writes the next bytes. Raises OSError."""
        self._crc = crc32(content, self._crc)
        self._file.write(content, self._at)
        self._at += len(content)

    def finish(self) -> None:
        """Writes header and trailer after all data. Raises OSError."""
        self._file.write(self._layout.header(self._crc), self._offset)
        self._file.write(self._layout.trailer(self._crc), self._offset + self._layout.data.end)


@dataclass(frozen=True)
class _Storage:
    """The storage in the pickle, which refers to it by name."""

    dtype: str
    elements: int


@dataclass(frozen=True)
class _Description:
    """Is pickled like a tensor by torch."""

    shape: tuple[int, ...]
    dtype: str

    def __reduce__(self) -> tuple[Any, ...]:
        from torch._utils import _rebuild_tensor_v2

        storage = _Storage(self.dtype, math.prod(self.shape))
        return _rebuild_tensor_v2, (storage, 0, self.shape, dense_stride(self.shape), False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        import torch

        if isinstance(value, _Storage):
            return "storage", getattr(torch, STORAGE_CLASS[value.dtype]), "0", "cpu", value.elements
        return None
