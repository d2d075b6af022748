"""The options of a launch as a rule asks for them, and the two commonest rules as rows of a table.

An option whose value is not known, or that may be among words that are not known, breaks no rule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verify.issue import Issue
from verify.launch.options.given import GivenArguments
from verify.report import Severity


@dataclass(frozen=True)
class Options:
    """The options of a launch of slime, miles or vime.

    `program`: the file that starts the trainer, `train_async.py`, where it is known. `paths`: arguments whose path
    preflight was given itself. `miles`: an option is among those that only miles has. `config`: the model's
    config.json, empty where it is not known. `resumed`: the iteration that the actor goes on from, 0 for a new run.
    """

    given: GivenArguments
    program: str = ""
    paths: frozenset[str] = frozenset()
    miles: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    resumed: int = 0

    def on(self, name: str) -> bool:
        """Whether it is given for certain, and not turned off by a file of settings."""
        given = name in self.given.places and self.given.values.get(name) is not False
        return given or name in self.paths

    def off(self, name: str) -> bool:
        """Whether it is left out for certain."""
        return not self.on(name) and not self.given.anything

    def value(self, name: str, default: Any = None) -> Any:
        """Its value, `default` where it is left out for certain; None where it is not known."""
        if name in self.given.unknown or (name not in self.given.values and not self.off(name)):
            return None
        return self.given.values.get(name, default)

    def written(self, *names: str) -> str:
        """`--n-samples-per-prompt 8 (run.sh:12)`, or the option's name alone where it is not given."""
        return ", ".join(self._said(name) for name in names)

    def _said(self, name: str) -> str:
        option = _option(name)
        if name not in self.given.places:
            return f"no {option}"
        value = self.given.values.get(name)
        shown = option if value is None or isinstance(value, bool) else f"{option} {value}"
        return f"{shown} ({self.given.place(name)})"

    def issue(
        self, names: Sequence[str], expected: str, hint: str, severity: Severity = "error", actual: str = ""
    ) -> Issue:
        """What is wrong with these options, the first of which gives the file."""
        word = next((self.given.places[name] for name in names if name in self.given.places), None)
        return Issue(
            expected, actual or self.written(*names), hint, file=word.file if word else None, severity=severity
        )


@dataclass(frozen=True)
class Needs:
    """An option that is refused without one of others. `unless`: options with which it is not."""

    option: str
    others: tuple[str, ...]
    why: str
    unless: tuple[str, ...] = ()

    def broken(self, options: Options) -> Iterator[Issue]:
        """The issue, where the option is given and none of the others is."""
        if not options.on(self.option) or any(map(options.on, self.unless)):
            return
        if all(options.off(name) for name in self.others):
            wanted = " or ".join(map(_option, self.others))
            yield options.issue((self.option, *self.others), f"{wanted} with {_option(self.option)}", self.why)


@dataclass(frozen=True)
class Excludes:
    """Two options that are refused together."""

    option: str
    other: str
    why: str

    def broken(self, options: Options) -> Iterator[Issue]:
        """The issue, where both are given."""
        if options.on(self.option) and options.on(self.other):
            expected = f"only one of {_option(self.option)} and {_option(self.other)}"
            yield options.issue((self.option, self.other), expected, self.why)


def broken(rows: Collection[Needs | Excludes], options: Options) -> Iterator[Issue]:
    """The issues of all rows that a launch breaks."""
    for row in rows:
        yield from row.broken(options)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
