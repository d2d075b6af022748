"""Prints what comes from checkpoints: all output of the command line goes through here or `verify.reports.render`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import click

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import json_text, printable


def echo(*lines: str, err: bool = False) -> None:
    """Prints lines on standard output or standard error, made printable. Raises as `saying`.

    Nobody is told where standard error takes nothing.
    """
    text = "\n".join(map(printable, lines))
    if not err:
        with saying():
            click.echo(text)
        return
    try:
        click.echo(text, err=True)
    except OSError:
        _drop(sys.stderr)


def echo_json(content: Any) -> None:
    """Prints JSON on standard output. Raises as `saying`."""
    with saying():
        click.echo(json_text(content))


@contextmanager
def saying() -> Iterator[None]:
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
