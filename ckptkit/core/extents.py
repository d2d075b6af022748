"""Where the bytes of tensors stand in files, and what they are read with."""

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
    """Memory of one thread that byte ranges are read into; results are valid until the next `load` or `read`."""

    def load(self, ranges: Iterable[ByteRange]) -> None:
        """Replaces the loaded ranges, by none if too large. Skips unreadable ones: who reads them later raises."""

    def loaded(self, wanted: ByteRange) -> Tensor | None:
        """Bytes that are loaded, uint8 [bytes]. Neighbours in a file are neighbours in memory."""

    def read(self, wanted: ByteRange) -> memoryview:
        """Reads one range in place of what was loaded; fewer bytes where the file ends. Raises OSError."""


class Extent(Protocol):
    """Bytes of a file that are those of a tensor or of a part of it; and the CRC-32 to check, where `read` does not."""

    @property
    def path(self) -> Path: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def crc(self) -> int | None: ...

    def read(self, reader: Reader, start: int, nbytes: int) -> memoryview:
        """The next bytes, in the memory of `reader`, from `start`, the last end. Raises OSError, CkptkitError."""


class FileBacked(Checkpoint, Protocol):
    """A checkpoint that knows of some tensors where their bytes stand in files."""

    def byte_ranges(self, names: Sequence[str]) -> Iterable[ByteRange]:
        """What is read of local files to make these tensors. Opens no file."""

    def is_streamable(self, name: str) -> bool:
        """Whether the bytes stand in files as they are and in order, and need not be held whole. Opens no file."""

    def extents(self, name: str) -> Sequence[Extent] | None:
        """Where they stand, in order; None where they do not. The last extent may be longer than the tensor."""

    def read(self, names: Sequence[str], reader: Reader | None = None) -> dict[str, Tensor]:
        """As `Checkpoint.read`; what `reader` has loaded is not read again, and tensors of it lie in its memory."""


def _is_file_backed(checkpoint: Checkpoint) -> TypeGuard[FileBacked]:
    # isinstance would ask for every member of the protocol, and a plan asks a hundred thousand times.
    return hasattr(checkpoint, "extents")


def byte_ranges_of(checkpoint: Checkpoint, names: Sequence[str]) -> Iterable[ByteRange]:
    """What is read of local files to make these tensors, as far as the checkpoint knows."""
    return checkpoint.byte_ranges(names) if _is_file_backed(checkpoint) else ()


def is_streamable(checkpoint: Checkpoint, name: str) -> bool:
    """Whether the bytes of a tensor stand in files as they are and in order. Opens no file."""
    return _is_file_backed(checkpoint) and checkpoint.is_streamable(name)


def extents_of(checkpoint: Checkpoint, name: str) -> Sequence[Extent] | None:
    """Where the bytes of a tensor stand in files, if they do."""
    return checkpoint.extents(name) if _is_file_backed(checkpoint) else None


def read_with(checkpoint: Checkpoint, names: Sequence[str], reader: Reader | None) -> dict[str, Tensor]:
    """Reads tensors, with `reader` where the checkpoint stands in files."""
    return checkpoint.read(names, reader) if _is_file_backed(checkpoint) else checkpoint.read(names)
