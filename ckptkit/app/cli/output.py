"""Prints what comes from checkpoints: all output of the command line goes through here or `verify.reports.render`."""

from __future__ import annotations

from typing import Any

import click

from ckptkit.core.printable import json_text, printable


def echo(*lines: str, err: bool = False) -> None:
    """Prints lines on standard output or standard error, made printable."""
    click.echo("\n".join(map(printable, lines)), err=err)


def echo_json(content: Any) -> None:
    """Prints JSON on standard output."""
    click.echo(json_text(content))
