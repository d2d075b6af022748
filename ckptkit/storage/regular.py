"""Opens untrusted files: only regular ones, because pipes and devices may block, and with a limit of their size."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def open_descriptor(path: Path) -> int:
    """A descriptor for reading a regular file. Raises OSError, with EINVAL for anything else, without blocking."""
    # Checked before opening, which affects some devices, and after, because the file may have been replaced.
    _require_regular(os.stat(path), path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file for reading. Raises OSError like `open_descriptor`."""
    return open(open_descriptor(path), "rb")


def read_regular(path: Path, limit: int) -> bytes:
    """The contents of a regular file of at most `limit` bytes. Raises OSError, with EFBIG for a larger one."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        # Files of /proc have size 0, and may return None. Allocate no more than the size, unless the file is larger.
        content = b"" if size > limit else file.read(size + 1) or b""
        if len(content) > size:
            content += file.read(limit + 1 - len(content)) or b""
    if max(size, len(content)) > limit:
        raise OSError(errno.EFBIG, f"it has {max(size, len(content))} bytes, but at most {limit} are read", str(path))
    return content


def kind_of(entry: os.stat_result) -> str:
    """The kind of something that is not a regular file."""
    return _KINDS.get(stat.S_IFMT(entry.st_mode), "of another kind")


def _require_regular(entry: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(entry.st_mode):
        raise OSError(errno.EINVAL, f"not a regular file, but {kind_of(entry)}", str(path))
