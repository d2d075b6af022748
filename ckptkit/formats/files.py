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

FILE_BYTES = 5_000_000_000  # the default size of a file
_PARTS, _LEAST_BYTES = 8, 500_000_000
Digests = Mapping[str, TensorDigest]
Piece = Callable[[int, int], memoryview]


def part_bytes(nbytes: int) -> int:
    """Bytes of a file, an eighth of the weights (500 MB to 5 GB): an interrupted run keeps finished files."""
    return min(max(nbytes // _PARTS, _LEAST_BYTES), FILE_BYTES)


class Files(Protocol):
    """The files to write, as data: specs determine every position, so that any threads and machines can write them."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor, by name."""

    @property
    def names(self) -> Mapping[str, Sequence[str]]:
        """The tensors of each file; files are relative to the checkpoint's root."""

    def size(self, file: str) -> int:
        """Bytes of a file."""

    def extra_bytes(self, file: str) -> tuple[int, bytes]:
        """The offset and bytes of the part of a file that belongs to no tensor."""

    def put(self, name: str, file: WrittenFile, piece: Piece) -> None:
        """Writes one tensor to its place in `file`; `piece` returns its bytes in order, at most BUFFER at once."""

    def read(self, file: str, root: Path) -> Iterator[tuple[str, Tensor]]:
        """Reads the tensors of a file back. Raises CkptkitError if it is damaged."""

    def prepare(self) -> None:
        """Does slow work for `finish` that can run while files are written."""

    def finish(self, root: Path) -> None:
        """Completes the checkpoint after all files are written: an index, metadata, a tracker."""
