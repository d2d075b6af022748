"""Brings files into the page cache while the program is still being imported, until it reads them itself.

Importing torch and transformers takes seconds of processor time in which the disk would be idle. Nothing here imports them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

WINDOW = 16 << 30  # bytes
_STEP = 64 << 20
_OWN = 128 << 20  # bytes from which on it is weights that the process reads itself, and no modules


@contextmanager
def reading_ahead(files: Sequence[Path]) -> Iterator[None]:
    """While the block runs, a thread has the kernel read these files in order, without copying, until the process reads weights itself: then it

    would fill memory with what that has read, or reads past the page cache. At most WINDOW bytes, or half of the memory that is free.
    """
    stop = threading.Event()
    thread = threading.Thread(target=_ask, args=(files, min(WINDOW, _available() // 2), stop), name="ckptkit-readahead")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _ask(files: Sequence[Path], window: int, stop: threading.Event) -> None:
    asked, began = 0, _read_so_far()
    # An error here comes again where the bytes are needed, and is told there.
    with suppress(OSError), Path(os.devnull).open("wb") as nowhere:
        for path in files:
            with path.open("rb") as stream:
                at, size = 0, os.fstat(stream.fileno()).st_size
                while at < size and not stop.is_set():
                    # What is asked for counts as read too.
                    if asked >= window or _read_so_far() - began - asked > _OWN:
                        return
                    # One call for many bytes: each return to Python waits for the interpreter lock, which imports rarely let go.
                    count = os.sendfile(nowhere.fileno(), stream.fileno(), at, min(_STEP, size - at))
                    if not count:
                        return
                    at, asked = at + count, asked + count


def _read_so_far() -> int:
    """Bytes that this process has read, of whatever file (proc_pid_io(5))."""
    return _number(Path("/proc/self/io"), "rchar:")


def _available() -> int:
    """Bytes of memory that can be had without swapping (proc_meminfo(5))."""
    return _number(Path("/proc/meminfo"), "MemAvailable:") * 1024


def _number(path: Path, key: str) -> int:
    """The number behind a key of one of the kernel's lists; 0 where this kernel has none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(key)), 0)
