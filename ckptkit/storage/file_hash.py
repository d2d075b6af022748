"""Hashes a file from pieces that several threads read, approximately in file order."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING

from ckptkit.storage.buffers import bytes_of
from ckptkit.storage.regular import open_regular

if TYPE_CHECKING:
    from torch import Tensor

_PIECE = 1 << 22  # bytes to read at a time
_AHEAD = 128 << 20  # bytes of pieces that wait for earlier ones


class FileHash:
    """Checks the SHA-256 of a file, or the SHA-1 of its bytes or git blob. `begin`: position of the first piece."""

    def __init__(self, path: Path, expected: str, begin: int = 0) -> None:
        self.path, self.expected = path, expected
        self.size = os.stat(path).st_size
        if len(expected) == 64:
            self._hashes = [hashlib.sha256()]
        else:
            git = hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
            self._hashes = [git, hashlib.sha1(usedforsecurity=False)]
        self._begin, self._done, self._ahead, self._busy = begin, 0, 0, False
        self._waiting: dict[int, Tensor] = {}
        self._changed = Condition()

    def add(self, offset: int, piece: Tensor) -> None:
        """Adds contiguous bytes, once; blocks while too many wait for another thread. Raises OSError."""
        with self._changed:
            while self._busy and self._ahead and self._ahead + piece.nbytes > _AHEAD:
                self._changed.wait()
            is_next = offset == max(self._done, self._begin)
            full = self._ahead + piece.nbytes > _AHEAD and not is_next and not self._busy
            if not piece.nbytes or offset < self._done or offset in self._waiting or full:
                return
            self._waiting[offset] = piece
            self._ahead += piece.nbytes
            if self._busy or not is_next:
                return
            self._busy = True
        try:
            if self._done < self._begin:
                self._read(self._begin)
            while (following := self._next()) is not None:
                self._update(bytes_of(following))
                self._done += following.nbytes
        except BaseException:
            with self._changed:  # other threads may wait for this one
                self._busy = False
                self._changed.notify_all()
            raise

    def _next(self) -> Tensor | None:
        """The next piece, or None if another thread will add and hash it."""
        with self._changed:
            piece = self._waiting.pop(self._done, None)
            if piece is None:
                self._busy = False
            else:
                self._ahead -= piece.nbytes
            self._changed.notify_all()
            return piece

    @property
    def unread(self) -> int:
        """Bytes that are not hashed yet."""
        return self.size - self._done

    def finish(self) -> bool:
        """Reads the missing bytes. Returns whether the file has the expected hash. Raises OSError."""
        self._waiting.clear()
        self._read(self.size)
        return any(one.hexdigest() == self.expected for one in self._hashes)

    @property
    def actual(self) -> str:
        """The hash of the bytes so far."""
        return self._hashes[0].hexdigest()

    def _read(self, end: int) -> None:
        with open_regular(self.path) as file:
            file.seek(self._done)
            while self._done < end and (piece := file.read(min(_PIECE, end - self._done))):
                self._update(piece)
                self._done += len(piece)

    def _update(self, piece: bytes | memoryview) -> None:
        for one in self._hashes:
            one.update(piece)
