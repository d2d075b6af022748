"""A lock file for one process at a time on any machine, which the kernel releases when the process dies.

It uses flock, which NFS supports, and Lustre if mounted with `flock`. On file systems without locks, the file itself is
the lock, and must be removed after a crash. filelock 4.2 is no replacement: it raises on ENOLCK and EOPNOTSUPP, locks
pipes and files of other programs, does not name the holder of a flock, and creates the file to check it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.storage.regular import kind_of

_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
_CONTENT = re.compile(r"ckptkit: (pid \d+ on .+)\n")
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # does not follow links or wait for pipes
_TRIES = 5  # `check_free` of another process may hold the lock for a moment
_PAUSE_S = 0.02
_MAX_BYTES = 1000  # bytes of a lock file that are read


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Holds the lock file `path` during the block. Raises CkptkitError if another run holds it."""
    descriptor = _acquire(path)
    try:
        yield
    finally:
        # Removed while locked: a process that has already opened it sees that it is not at its path, and tries again.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def check_free(path: Path) -> None:
    """Raises CkptkitError, like `hold_lock`, if another run holds the lock file `path`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unusable(path, error.strerror) from error
    try:
        _require_file(path, descriptor)
        if (outcome := _try(descriptor, fcntl.LOCK_SH)) != "ours":
            raise _held(path, descriptor, outcome)
    finally:
        os.close(descriptor)


def _acquire(path: Path) -> int:
    for left in reversed(range(_TRIES)):
        descriptor, made = _open(path)
        try:
            _require_file(path, descriptor)
            outcome = _try(descriptor, fcntl.LOCK_EX)
            refused = outcome == "held" or (outcome == "no locks" and not made)
            if refused and not left:
                raise _held(path, descriptor, outcome)
            if not refused:
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor)):
                        _write_holder(path, descriptor)
                        return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(_PAUSE_S)
    raise CkptkitError(f"another program removes {path} repeatedly", "run no other program in its directory")


def _held(path: Path, descriptor: int, outcome: str) -> CkptkitError:
    hint = "wait until that run has ended, or choose another destination"
    if outcome == "no locks":
        hint += f"; this file system has no locks: if that process is dead, remove {path}"
    return CkptkitError(f"another run writes to this destination: {_holder(path, descriptor)} holds {path}", hint)


def _open(path: Path) -> tuple[int, bool]:
    """A descriptor of the lock file, and whether it was just created."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o644), True
    except FileExistsError:
        pass
    except OSError as error:
        raise _unusable(path, error.strerror) from error
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o644), False
    except OSError as error:
        raise _unusable(path, error.strerror) from error


def _require_file(path: Path, descriptor: int) -> None:
    """Raises CkptkitError for a pipe or a device in place of the lock file."""
    if not stat.S_ISREG((found := os.fstat(descriptor)).st_mode):
        raise _unusable(path, f"is not a regular file, but {kind_of(found)}")


def _unusable(path: Path, why: str | None) -> CkptkitError:
    hint = "make its directory writable, or remove this lock file, which keeps two runs from writing to one destination"
    return CkptkitError(f"{path}: {why}", hint)


def _try(descriptor: int, kind: int) -> str:
    """Requests the lock without waiting: "ours", "held" by another, or "no locks" on this file system."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return "held"
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return "no locks"
    return "ours"


def _holder(path: Path, descriptor: int) -> str:
    """The process in the lock file. Raises CkptkitError for another file, which must not be overwritten."""
    content = os.pread(descriptor, _MAX_BYTES, 0).decode(errors="replace")
    if content and not (found := _CONTENT.fullmatch(content)):
        raise _unusable(path, "is not a lock file of ckptkit")
    return found[1] if content and found else "a process that has just begun"


def _write_holder(path: Path, descriptor: int) -> None:
    _holder(path, descriptor)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"ckptkit: pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise CkptkitError(f"{path}: {error.strerror}", "free some space on that disk") from error
