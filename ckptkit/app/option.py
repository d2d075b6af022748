"""An option of a verb: how it is spelled, what it has an effect beside, and which options exclude each other.

It imports nothing that a file of the user's may hide: whether one does is asked after this was imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click


@dataclass(frozen=True)
class Needs:
    """An option has an effect only with `any_of` these click parameters, in verbs that have one."""

    any_of: tuple[str, ...]
    hint: str


class Option(click.Option):
    """An option of a verb, and what it has an effect beside."""

    def __init__(self, *words: Any, needs: tuple[Needs, ...] = (), **row: Any) -> None:
        super().__init__(*words, **row)
        self.needs = needs


def option(*words: str, needs: Needs | tuple[Needs, ...] = (), **row: Any) -> Callable[[Any], Any]:
    """`click.option` of an Option."""
    return click.option(*words, cls=Option, needs=needs if isinstance(needs, tuple) else (needs,), **row)


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes one decorator of several options, which --help lists in this order."""

    def decorate(command: Any) -> Any:
        for one in reversed(options):
            command = one(command)
        return command

    return decorate


# Of these at most one is given: beside it the others would be left unread, or contradict it.
EXCLUDES = (
    (("quiet", "verbose"), "one says less, the other more: give one of them"),
    (("every", "as_json"), "--json has every check and all details as it is: leave --all out"),
    (("resume", "overwrite"), "--resume continues the earlier run, --overwrite replaces its output: give one of them"),
    (("trained", "adapter"), "what an adapter adds is compared bit for bit: leave --trained out"),
    (("like", "preset"), "both choose the packed weights: give one of them"),
)
