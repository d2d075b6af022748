"""The files of a checkpoint to write, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ckptkit.core.specs import TensorSpec
from ckptkit.storage.digest import TensorDigest
from ckptkit.storage.write import WrittenFile

if TYPE_CHECKING:
    from torch import Tensor

FILE_BYTES = 5_000_000_000  # where a file ends unless something else says so
_PARTS, _LEAST_BYTES = 8, 500_000_000
Digests = Mapping[str, TensorDigest]
Piece = Callable[[int, int], memoryview]


def part_bytes(nbytes: int) -> int:
    """Bytes of a file, an eighth of the weights (500 MB to 5 GB): a run that is cut off keeps finished files."""
    return min(max(nbytes // _PARTS, _LEAST_BYTES), FILE_BYTES)


class Files(Protocol):
    """The files of a checkpoint to write, as data: where each byte will lie follows from the tensors' specs alone.

    So any number of threads, processes and machines may write them, and what they write is always the same.
    """

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor, by name."""

    @property
    def names(self) -> Mapping[str, Sequence[str]]:
        """Which tensors stand in which file; files are relative to the checkpoint's root."""

    def size(self, file: str) -> int:
        """Bytes of a file."""

    def extra_bytes(self, file: str) -> tuple[int, bytes]:
        """Where bytes of a file stand that belong to no tensor, and these bytes."""

    def put(self, name: str, file: WrittenFile, piece: Piece) -> None:
        """Writes one tensor to its place in `file`, asking `piece` for its bytes in order, at most BUFFER at once."""

    def read(self, file: str, root: Path) -> Iterator[tuple[str, Tensor]]:
        """Reads the tensors of a file back. Raises CkptkitError where it is damaged."""

    def prepare(self) -> None:
        """Does what takes a while and can be done while files are written, for `finish` to be quick."""

    def finish(self, root: Path) -> None:
        """Writes what makes a checkpoint of the files when all are there: an index, metadata, a tracker."""
