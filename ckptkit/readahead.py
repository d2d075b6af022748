"""Brings files into the page cache while the program is still being imported, and then stays ahead of its reading.

Importing torch and transformers takes seconds of processor time in which the disk would be idle. Nothing here imports them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

WINDOW = 4 << 30  # bytes asked for and not yet read
_STEP = 64 << 20
_PAUSE_S = 0.02


@contextmanager
def reading_ahead(files: Sequence[Path]) -> Iterator[None]:
    """While the block runs, a thread has the kernel read these files in order, without copying: at most WINDOW bytes ahead of the process."""
    stop = threading.Event()
    thread = threading.Thread(target=_ask, args=(files, min(WINDOW, _available() // 4), stop), name="ckptkit-readahead")
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
                    if 2 * asked - (_read_so_far() - began) >= window:
                        stop.wait(_PAUSE_S)
                        continue
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
