"""A lock file that one process at a time holds, on whatever machine it runs, and that no dead process holds.

The file has the kernel's own lock (flock), which a process that is killed lets go. NFS has such locks on the server,
Lustre where it is mounted with `flock`. Elsewhere the file itself is the lock, and after a crash must be removed.

The library filelock does not replace this; 4.2 was tried. It raises on ENOLCK and EOPNOTSUPP, locks pipes and files of
other programs, does not name the holder of a flock, and creates the file in order to see whether it is held.
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
from contextlib import contextmanager
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.storage.regular import kind_of

_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
_CONTENT = re.compile(r"ckptkit: (pid \d+ on .+)\n")
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a link is not followed, a pipe not waited for
_TRIES = 5  # `check_free` of another process may have it for a moment
_PAUSE_S = 0.02
_MAX_BYTES = 1000  # bytes of a lock file that are read


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Holds the lock file `path` while the block runs. Raises CkptkitError when another run holds it."""
    descriptor = _acquired(path)
    try:
        yield
    finally:
        # Removed while it is held: who has opened it already finds no such file at its path, and tries again.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def check_free(path: Path) -> None:
    """Raises CkptkitError, as `hold_lock` does, when another run holds the lock file `path`."""
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


def _acquired(path: Path) -> int:
    for left in reversed(range(_TRIES)):
        descriptor, made = _opened(path)
        try:
            _require_file(path, descriptor)
            outcome = _try(descriptor, fcntl.LOCK_EX)
            refused = outcome == "held" or (outcome == "no locks" and not made)
            if refused and not left:
                raise _held(path, descriptor, outcome)
            if not refused and _is_at(path, descriptor):
                _write_holder(path, descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(_PAUSE_S)
    raise CkptkitError(f"{path} comes and goes", "let nothing else start runs with this destination")


def _held(path: Path, descriptor: int, outcome: str) -> CkptkitError:
    hint = "wait until it has ended, or choose another destination"
    if outcome == "no locks":
        hint += f"; this file system has no locks: if that process is dead, remove {path}"
    return CkptkitError(f"another run is writing there: {_words(path, descriptor)} holds {path}", hint)


def _opened(path: Path) -> tuple[int, bool]:
    """A descriptor of the lock file, and whether it was made just now."""
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
    return CkptkitError(
        f"{path}: {why}",
        "it keeps two runs from writing to one destination: make its directory writable, "
        "or remove what is in its place",
    )


def _try(descriptor: int, kind: int) -> str:
    """Asks for the lock without waiting: "ours", "held" by another, or "no locks" on this file system."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return "held"
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return "no locks"
    return "ours"


def _words(path: Path, descriptor: int) -> str:
    """Who has written the lock file. Raises CkptkitError when it is not a lock file, and must not be written over."""
    content = os.pread(descriptor, _MAX_BYTES, 0).decode(errors="replace")
    if content and not (found := _CONTENT.fullmatch(content)):
        raise _unusable(path, "is not a lock file of ckptkit")
    return found[1] if content and found else "a process that has just begun"


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the open file still is the one at the path."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _write_holder(path: Path, descriptor: int) -> None:
    _words(path, descriptor)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"ckptkit: pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise CkptkitError(f"{path}: {error.strerror}", "free some space there") from error
