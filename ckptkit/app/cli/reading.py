"""Reads weights ahead while the program is still being imported."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from itertools import zip_longest
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import locate
from ckptkit.storage.readahead import reading_ahead


def reading(checkpoint: Path, source: Path | None) -> AbstractContextManager[None]:
    """Reads the weights of both sides while the block runs, a file of each in turn, as they will be compared."""
    sides = [_weights(path) for path in (checkpoint, source) if path]
    return reading_ahead([file for files in zip_longest(*sides) for file in files if file])


def _weights(path: Path) -> list[Path]:
    # Why there is no checkpoint here is for the command itself to say.
    with suppress(CkptkitError):
        path = locate(path).path
    return sorted([*path.glob("*.safetensors"), *path.glob("*.distcp")])
