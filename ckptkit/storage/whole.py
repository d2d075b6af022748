"""Writes what readers see whole or not at all, also after the machine went down."""

from __future__ import annotations

import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_AT_ONCE = 16  # a file system flushes what is asked for together at once


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes `content` (text in UTF-8) in place of `path`, under another name until it is whole. Raises OSError.

    A link at `path` is replaced, not followed.
    """
    descriptor, name = new_file(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            # Half of a surrogate pair, which a file's name may hold, is no UTF-8.
            file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
            file.flush()
            os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def new_file(path: Path) -> tuple[int, Path]:
    """A new file beside `path` with a name of its own, open for reading and writing, and that name. Raises OSError.

    Its permissions are those of any new file: what the umask leaves.
    """
    name = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), name


def sync_tree(root: Path) -> None:
    """Waits until every file below `root`, and its name, is on the disk. Raises OSError where one cannot be written."""
    paths = [os.path.join(folder, name) for folder, _, files in os.walk(root, onerror=_raise) for name in [*files, "."]]
    with ThreadPoolExecutor(_AT_ONCE, "ckptkit-sync") as pool:
        list(pool.map(_sync, paths))


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise(error: OSError) -> None:
    raise error
