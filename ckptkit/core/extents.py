"""Where the bytes of tensors stand in files."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

# Bytes of a file, from the one to before the other.
Place = tuple[Path, int, int]


class Extent(Protocol):
    """Bytes of a file that are those of a tensor, or of a part of it, as they are; and the CRC-32 to check, where reading them does not."""

    @property
    def path(self) -> Path: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def crc(self) -> int | None: ...

    def view(self, start: int, nbytes: int) -> memoryview:
        """So many bytes from `start`, which is where the last call ended, until anything else is read by this thread. Raises OSError and CkptkitError."""
