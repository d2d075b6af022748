"""Says on stderr what a command is doing: each step that takes long, a line every 30 s, and the time at the end."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ckptkit.app.cli.output import echo
from ckptkit.core.progress import LOG

_TICK_S = 0.2
_LONG_S = 1.0  # a step that takes longer is shown on a terminal
_EVERY_S = 30.0  # off a terminal


@dataclass
class _Step:
    label: str
    began: float
    has_bar: bool
    done: str = ""
    shown: bool = False


class _Status(logging.Handler):
    """Follows the records of `ckptkit.core.progress`, and prints from a thread of its own."""

    def __init__(self, verbose: bool) -> None:
        super().__init__()
        self._verbose = verbose
        self._terminal = bool(sys.stderr and sys.stderr.isatty())
        self._began = self._last = time.monotonic()
        self._steps = [_Step("starting", self._began, has_bar=False)]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ckptkit-status", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Takes a step that begins, goes on or ends; a record without one is printed."""
        step, label = record.__dict__.get("step"), record.getMessage()
        if step == "begin":
            self._steps.append(_Step(label, time.monotonic(), record.__dict__["bar"], shown=self._verbose))
            if self._verbose:
                echo(f"{label} ...", err=True)
        elif step == "end":
            self._steps.pop()
        elif step == "note":
            echo(label, err=True)
        elif step == "done":
            self._steps[-1].done = f", {record.__dict__['done']}"
        else:
            after, took = record.__dict__.get("next"), time.monotonic() - self._began
            if after or self._verbose or took > _LONG_S:
                echo(f"{label} in {took:.1f} s", *([f"next: {after}"] if after else []), err=True)

    def end(self) -> None:
        """Stops the thread."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_TICK_S):
            with self.lock or threading.RLock():
                self._tick(time.monotonic())

    def _tick(self, now: float) -> None:
        step = self._steps[-1]
        if self._terminal:
            if not (step.shown or step.has_bar) and now - step.began > _LONG_S:
                step.shown = True
                echo(f"{step.label} ...", err=True)
        elif now - self._last > _EVERY_S:
            self._last = now
            echo(f"{step.label}{step.done}: {now - self._began:.0f} s", err=True)


@contextmanager
def shown(asked: Collection[str]) -> Iterator[None]:
    """Shows the steps of what runs inside, or with "quiet" none, nor a bar; with "verbose" each as it begins."""
    level = LOG.level
    if "quiet" in asked:
        LOG.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            LOG.setLevel(level)
        return
    status = _Status("verbose" in asked)
    LOG.addHandler(status)
    LOG.setLevel(logging.INFO)
    propagate, LOG.propagate = LOG.propagate, False
    try:
        yield
    finally:
        LOG.removeHandler(status)
        LOG.setLevel(level)
        LOG.propagate = propagate
        status.end()
