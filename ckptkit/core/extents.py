"""Protocols for the positions of tensors in files, and for reading them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeGuard

from ckptkit.core.checkpoint import Checkpoint

if TYPE_CHECKING:
    from torch import Tensor


class ByteRange(NamedTuple):
    """Bytes of a file from `begin` to before `end`."""

    path: Path
    begin: int
    end: int


class Reader(Protocol):
    """Memory of one thread for reading byte ranges; results are valid until the next `load` or `read`."""

    def load(self, ranges: Iterable[ByteRange]) -> None:
        """Replaces the loaded ranges, by nothing if they are too large. Skips unreadable ranges: later reads raise."""

    def loaded(self, wanted: ByteRange) -> Tensor | None:
        """Loaded bytes, uint8 [bytes], or None. Adjacent ranges in a file are adjacent in memory."""

    def read(self, wanted: ByteRange) -> memoryview:
        """Reads one range, and discards the loaded ones. Returns fewer bytes at the end of a file. Raises OSError."""


class Extent(Protocol):
    """Bytes in a file of a tensor or a part of it, and the CRC-32 to check unless `read` does it."""

    @property
    def path(self) -> Path: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def crc(self) -> int | None: ...

    def read(self, reader: Reader, start: int, nbytes: int) -> memoryview:
        """The next bytes, in the memory of `reader`, from `start`, the last end. Raises OSError, CkptkitError."""


class FileBacked(Checkpoint, Protocol):
    """A checkpoint that knows the positions of some tensors in files."""

    def byte_ranges(self, names: Sequence[str]) -> Iterable[ByteRange]:
        """The ranges of local files to read for these tensors. Opens no file."""

    def is_streamable(self, name: str) -> bool:
        """Whether files contain the unchanged bytes in order, so that they can be copied in pieces. Opens no file."""

    def extents(self, name: str) -> Sequence[Extent] | None:
        """The positions in order, or None if not streamable. The last extent may be longer than the tensor."""

    def read(self, names: Sequence[str], reader: Reader | None = None) -> dict[str, Tensor]:
        """Like `Checkpoint.read`, but tensors in loaded ranges of `reader` share its memory."""


def _is_file_backed(checkpoint: Checkpoint) -> TypeGuard[FileBacked]:
    # isinstance would check every member of the protocol, and a plan makes a hundred thousand calls.
    return hasattr(checkpoint, "extents")


def byte_ranges_of(checkpoint: Checkpoint, names: Sequence[str]) -> Iterable[ByteRange]:
    """The ranges of local files to read for these tensors, if the checkpoint knows them."""
    return checkpoint.byte_ranges(names) if _is_file_backed(checkpoint) else ()


def is_streamable(checkpoint: Checkpoint, name: str) -> bool:
    """Whether files contain the unchanged bytes of a tensor in order. Opens no file."""
    return _is_file_backed(checkpoint) and checkpoint.is_streamable(name)


def extents_of(checkpoint: Checkpoint, name: str) -> Sequence[Extent] | None:
    """The positions of a tensor's bytes in files, or None."""
    return checkpoint.extents(name) if _is_file_backed(checkpoint) else None


def read_with(checkpoint: Checkpoint, names: Sequence[str], reader: Reader | None) -> dict[str, Tensor]:
    """Reads tensors, with `reader` if the checkpoint supports it."""
    return checkpoint.read(names, reader) if _is_file_backed(checkpoint) else checkpoint.read(names)
