"""Opens files that others wrote: regular ones only, so that no pipe or device is waited for, and never past a limit."""

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
    """A descriptor for reading a regular file. Raises OSError, with EINVAL for anything else, which is not waited for.

    It is looked at before, because to open a device may do something, and after, because it may be another by then.
    """
    _require_regular(os.stat(path), path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_regular(path: Path) -> BufferedReader:
    """A regular file, open for reading. Raises OSError as `open_descriptor`."""
    return open(open_descriptor(path), "rb")


def read_regular(path: Path, limit: int) -> bytes:
    """All of a regular file of at most `limit` bytes. Raises OSError, with EFBIG for a larger one."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        # Files of /proc may have nothing to give at the moment: reading then gives None.
        # No more memory is asked for than the file has bytes, unless it grows or is one of /proc, which has no size.
        content = b"" if size > limit else file.read(size + 1) or b""
        if len(content) > size:
            content += file.read(limit + 1 - len(content)) or b""
    if max(size, len(content)) > limit:
        raise OSError(errno.EFBIG, f"{max(size, len(content))} bytes, and at most {limit} are read", str(path))
    return content


def kind_of(found: os.stat_result) -> str:
    """What is not a regular file, in words."""
    return _KINDS.get(stat.S_IFMT(found.st_mode), "of another kind")


def _require_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, f"no regular file, but {kind_of(found)}", str(path))
