"""Options of verbs, the options that they depend on, and options that exclude each other.

It imports no package that a user's file could shadow: the check for such files runs after this import.
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
    """An option of a verb; without one of those in `needs` it has no effect."""

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


# At most one of these may be given; together, one would have no effect or contradict the other.
EXCLUDES = (
    (("quiet", "verbose"), "pass one of them: the first prints less, the second more"),
    (("every", "as_json"), "--json already has every check and all details: remove --all"),
    (("resume", "overwrite"), "pass one of them: --resume continues the earlier run, --overwrite replaces its output"),
    (("trained", "adapter"), "the change by an adapter is compared bit for bit: remove --trained"),
    (("like", "preset"), "pass one of them: both choose the packed weights"),
)
