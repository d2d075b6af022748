"""Prints results safely on stdout, and the progress of a command on stderr.

All output of the command line goes through here or `ckptkit.verify.reports.render`. Off a terminal, a long step prints
a line every 30 s; the closing line has the total time.
"""

from __future__ import annotations

import io
import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO

import click

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import json_text, printable
from ckptkit.core.progress import LOG, closing


def echo(*lines: str, err: bool = False) -> None:
    """Prints lines, made printable. Raises like `guard_stdout`; errors on standard error are ignored."""
    text = "\n".join(map(printable, lines))
    if not err:
        with guard_stdout():
            click.echo(text)
        return
    try:
        click.echo(text, err=True)
    except OSError:
        _drop(sys.stderr)


def echo_json(content: Any) -> None:
    """Prints JSON on standard output. Raises like `guard_stdout`."""
    with guard_stdout():
        click.echo(json_text(content))


def echo_result(result: Any, as_json: bool) -> None:
    """Prints a result as JSON or as text."""
    if as_json:
        echo_json(result.to_json())
    else:
        echo(*str(result).split("\n"))


@contextmanager
def guard_stdout() -> Iterator[None]:
    """Raises CkptkitError if output of the block cannot be written, for example on a full disk.

    After a closed pipe (`| head`) further output is discarded, and the exit code remains that of the verb.
    """
    try:
        yield
    except BrokenPipeError:
        _drop(sys.stdout)
    except OSError as error:
        _drop(sys.stdout)
        hint = "run it again with a writable standard output; the requested files are written"
        raise CkptkitError(f"standard output: {error.strerror}", hint) from error


def end(counts: str, as_json: bool, after: Sequence[str] = ()) -> None:
    """Prints the closing line on standard error: time, next command (`after`), and under `--json` the `counts`."""
    closing(counts if as_json else "done", shlex.join(["ckptkit", *after]) if after else None)


def prepare_streams() -> None:
    """Lets standard streams accept any character, and opens closed ones.

    If a shell closed one (`>&-`), the next opened file would get its number and receive the output of libraries.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop(stream: TextIO) -> None:
    """Redirects a failed stream to /dev/null: Python would flush it again at exit, and fail."""
    with suppress(io.UnsupportedOperation):  # a stream in memory
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


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
    """Handles the records of `ckptkit.core.progress`, and prints from a separate thread."""

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
        """Updates the current step; a record without a step is printed."""
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
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_TICK_S):
            with self.lock or threading.RLock():
                step, now = self._steps[-1], time.monotonic()
                if self._terminal:
                    if not (step.shown or step.has_bar) and now - step.began > _LONG_S:
                        step.shown = True
                        echo(f"{step.label} ...", err=True)
                elif now - self._last > _EVERY_S:
                    self._last = now
                    echo(f"{step.label}{step.done}: {now - self._began:.0f} s", err=True)


@contextmanager
def show_progress(flags: Collection[str]) -> Iterator[None]:
    """Shows long steps of the block; with "verbose" every step, with "quiet" none and no bar."""
    level = LOG.level
    if "quiet" in flags:
        LOG.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            LOG.setLevel(level)
        return
    status = _Status("verbose" in flags)
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
