"""Prints what comes from checkpoints, and says on stderr what a command is doing.

All output of the command line goes through here or `ckptkit.verify.reports.render`. Of a step that takes long there is
a line every 30 s, and at the end its time.
"""

from __future__ import annotations

import io
import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO

import click

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import json_text, printable
from ckptkit.core.progress import LOG, closing


def echo(*lines: str, err: bool = False) -> None:
    """Prints lines on standard output or standard error, made printable. Raises as `guard_stdout`.

    Nobody is told where standard error takes nothing.
    """
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
    """Prints JSON on standard output. Raises as `guard_stdout`."""
    with guard_stdout():
        click.echo(json_text(content))


def echo_result(found: Any, lines: Callable[[Any], Iterable[str]], as_json: bool) -> None:
    """Prints a result: as JSON, or as `lines` of it."""
    if as_json:
        echo_json(found.to_json())
    else:
        echo(*lines(found))


@contextmanager
def guard_stdout() -> Iterator[None]:
    """Raises CkptkitError where what is printed in the block cannot be written, as on a full disk.

    A reader that has gone (`| head`) has read enough: the rest is dropped, and the exit code stays the verb's own.
    """
    try:
        yield
    except BrokenPipeError:
        _drop(sys.stdout)
    except OSError as error:
        _drop(sys.stdout)
        hint = "files that were asked for are written; run it again with a standard output that takes everything"
        raise CkptkitError(f"standard output: {error.strerror}", hint) from error


def end(counts: str, as_json: bool, after: Sequence[str] = ()) -> None:
    """Ends a verb on standard error with what its standard output leaves out: the time, and the next command.

    Under `--json` also the `counts`, which its text says itself. `after` are the words of the next command. Without one
    the line is only for runs of a second and longer (`ckptkit.app.cli.output`).
    """
    closing(counts if as_json else "done", shlex.join(["ckptkit", *after]) if after else None)


def prepare_streams() -> None:
    """Lets standard streams take any character, and keeps their numbers from files that are opened later.

    Where a shell closed one (`>&-`), the next file would get its number, and what a library prints would go into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop(stream: TextIO) -> None:
    """Sends to nowhere what a stream could not take: Python would try again at its end, and fail."""
    with suppress(io.UnsupportedOperation):  # a stream in memory
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


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
def show_progress(asked: Collection[str]) -> Iterator[None]:
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
