"""What hooks say while a job runs, and in which process of it."""

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
    """Writes a line of ckptkit's to standard error."""
    print(printable(f"ckptkit: {text}"), file=sys.stderr, flush=True)


def first_lines(lines: Sequence[str]) -> list[str]:
    """The first 20 lines, and how many more there are."""
    rest = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return [*lines[:_SHOWN], *rest]


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Names what is still waited for on standard error, every 15 s, so that slow and stuck can be told apart."""
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
    """The rank of this process in the whole job; 0 outside a distributed one."""
    import torch

    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
