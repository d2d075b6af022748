"""A mutation: one way in which a checkpoint can be silently wrong, as data, and whether `verify` has found it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from verify.report import Finding, Report, Severity

# What has to be read to see it, from cheap to expensive: headers and JSON, configuration, all bytes, a source too.
Level = Literal["headers", "configuration", "values", "source"]
LEVELS: tuple[Level, ...] = ("headers", "configuration", "values", "source")

# Breaks the copy at a path, at the place that the registry names for this checkpoint: a tensor, a key, a file. Returns
# what a finding has to name; None where that is the place itself.
Damage = Callable[[Path, str], str | None]

_SOURCE = frozenset({"CK202", "CK203", "CK305"})
_VALUES = frozenset({"CK120", "CK304", "CK308"})
_BY_PREFIX: Mapping[str, Level] = {"CK1": "headers", "CK2": "values", "CK3": "headers", "CK7": "configuration"}


def level_of(code: str) -> Level:
    """What a check has to read. Raises KeyError for the code of a witness, which mutations do not run."""
    if code in _SOURCE:
        return "source"
    return "values" if code in _VALUES else _BY_PREFIX[code[:3]]


@dataclass(frozen=True)
class Mutation:
    """One way to be wrong, and what `verify` must say of it.

    `imitates` says what happened, in a sentence; `modes` are rows of lab/failure-modes.md, `references` threads.
    `on` gives for each checkpoint (`starts.LABELS`) the place that `damage` breaks. `code` must be found there with at
    least this `severity`, and no cheaper level may find anything, unless `cheapest` says which does. It is run with
    `--source`, the clean release, where the level or `with_source` says so, and with the clean checkpoint's manifest
    where `with_manifest` says so.
    `arguments` are those of `verify` (`tp`): then they may be what is wrong, and nothing on disk.
    """

    name: str
    imitates: str
    modes: tuple[str, ...]
    code: str
    damage: Damage
    on: Mapping[str, str]
    references: tuple[str, ...] = ()
    severity: Severity = "error"
    with_source: bool = False
    with_manifest: bool = False
    arguments: Mapping[str, int] = field(default_factory=dict)
    cheapest: Level | None = None

    @property
    def level(self) -> Level:
        """The cheapest at which something is found: that of its code, where no other is given."""
        return self.cheapest or level_of(self.code)

    @property
    def source(self) -> bool:
        """Whether it is run with the release to compare with."""
        return self.with_source or self.level == "source"


def missed(mutation: Mutation, named: str, report: Report) -> str | None:
    """Why this report does not do: nothing found, another code, another place, another level. None when it does."""
    found = [finding for finding in report.findings if finding.code == mutation.code]
    codes = sorted({finding.code for finding in report.findings})
    if not found:
        return f"{mutation.code} found nothing; findings are of {', '.join(codes) or 'no check'}"
    if not any(named in said(finding) for finding in found):
        return f"no finding of {mutation.code} names {named}: {[said(finding) for finding in found]}"
    if mutation.severity == "error" and not any(
        finding.severity == "error" for finding in found if named in said(finding)
    ):
        return f"{mutation.code} is only a warning"
    cheapest = min((level_of(code) for code in codes), key=LEVELS.index)
    return (
        None
        if cheapest == mutation.level
        else f"the level is {cheapest} ({', '.join(codes)}), the registry says {mutation.level}"
    )


def said(finding: Finding) -> str:
    """Where a finding says that it is: tensors, file, and the setting that it quotes."""
    where = (finding.tensor or "", *finding.names, Path(finding.file or "").name)
    return " ".join((*where, finding.expected, finding.actual))
