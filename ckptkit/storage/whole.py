"""Writes a text file that readers see whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes `text` in place of `path`, under another name until it is whole. Raises OSError.

    A link at `path` is replaced, not followed.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o644)
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
