"""A progress bar on stderr for whatever takes longer than a second; silent when stderr is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_DELAY_S = 1.0


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of bytes just done, of `total`."""
    if not (sys.stderr and sys.stderr.isatty()):  # None in a process without one
        yield lambda count: None
        return
    # Imported here because most runs have no terminal, and this takes a twentieth of a second.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
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
