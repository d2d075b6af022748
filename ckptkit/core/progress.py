"""Progress: steps as records of a logger, and a bar on a terminal for steps of more than a second.

Other output requires a handler on `LOG`, which the command line adds.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOG = logging.getLogger("ckptkit.progress")
_DELAY_S = 1.0


def size(nbytes: int) -> str:
    """A number of bytes for people: `26.40 MB`."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} bytes"


@contextmanager
def phase(label: str, *, bar: bool = False) -> Iterator[None]:
    """Logs the begin and end of a step. `bar`: a bar shows the step on a terminal."""
    LOG.info("%s", label, extra={"step": "begin", "bar": bar})
    try:
        yield
    finally:
        LOG.info("%s", label, extra={"step": "end"})


def closing(text: str, next_step: str | None = None) -> None:
    """Logs the result of a command, and the next command."""
    LOG.info("%s", text, extra={"next": next_step})


def note(text: str) -> None:
    """Logs a line that is shown at once."""
    LOG.info("%s", text, extra={"step": "note"})


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of bytes just done, of `total`. Shows a bar on terminals."""
    with phase(label, bar=True):
        # stderr may be None.
        if sys.stderr and sys.stderr.isatty() and LOG.isEnabledFor(logging.WARNING):
            with _bar(label, total) as advance:
                yield advance
            return
        done = 0

        def count_up(count: int) -> None:
            nonlocal done
            done += count
            LOG.info("%s", label, extra={"step": "done", "done": f"{size(done)} of {size(total)}"})

        yield count_up


@contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    # Most runs have no terminal, and this import takes 50 ms.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    text = TextColumn("{task.description}")
    columns = text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(label, total=total)
    began = time.monotonic()

    def advance(count: int) -> None:
        bar.advance(task, count)
        if not bar.live.is_started and time.monotonic() - began > _DELAY_S:
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()
