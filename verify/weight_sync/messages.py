"""Messages of hooks while a job runs, and the rank of this process."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ckptkit.core.printable import printable

_EVERY_S = 15.0
_SHOWN = 20  # lines of a message


def say(text: str) -> None:
    """Prints a line to standard error."""
    print(printable(f"ckptkit: {text}"), file=sys.stderr, flush=True)


def first_lines(lines: Sequence[str]) -> list[str]:
    """The first 20 lines, and the number of omitted ones."""
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [*lines[:_SHOWN], *more]


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Prints a line every 15 s while the caller waits."""
    began, done = time.monotonic(), threading.Event()

    def report() -> None:
        while not done.wait(_EVERY_S):
            say(f"{time.monotonic() - began:.0f} s of waiting for {what}")

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()


def job_rank() -> int:
    """The global rank of this process, 0 without torch.distributed."""
    import torch

    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
