"""A mutation: one way in which a checkpoint can be silently wrong, as data, and whether `verify` finds it."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from support import models

from ckptkit.verify.core.report import Severity
from ckptkit.verify.run import verify

# What has to be read to see it, from cheap to expensive: headers and JSON, configuration, all bytes, a source too.
Level = Literal["headers", "configuration", "values", "source"]
LEVELS = ("headers", "configuration", "values", "source")

# Breaks the copy at a path, at the place that the registry names for this checkpoint: a tensor, a key, a file. Where a
# finding has to name something else than that place, it returns this text.
Damage = Callable[[Path, str], object]

_SOURCE = frozenset({"CK202", "CK203", "CK305"})
_VALUES = frozenset({"CK120", "CK304", "CK308"})
_BY_PREFIX = {"CK1": "headers", "CK2": "values", "CK3": "headers", "CK7": "configuration"}


def level_of(code):
    """What a check has to read. Raises KeyError for the code of a witness, which mutations do not run."""
    if code in _SOURCE:
        return "source"
    return "values" if code in _VALUES else _BY_PREFIX[code[:3]]


@dataclass(frozen=True)
class Mutation:
    """One way to be wrong, and what `verify` must find. mutations.yaml has the values.

    `modes` are rows of lab/failure-modes.md, which tells what happened to whom. `on` gives for each checkpoint
    (`starts.labels`) the place that `damage` breaks. `code` must be found there with at least this `severity`, and no
    cheaper level may find anything, unless `cheapest` says which does. It is run with `--source`, the clean release,
    where the level or `with_source` says so, and with the clean checkpoint's manifest where `with_manifest` says so.
    `arguments` are those of `verify` (`tp`): then they may be what is wrong, and nothing on disk.
    """

    name: str
    modes: str
    code: str
    damage: Damage
    on: Mapping[str, str]
    severity: Severity = "error"
    with_source: bool = False
    with_manifest: bool = False
    arguments: Mapping[str, int] = field(default_factory=dict)
    cheapest: Level | None = None

    @property
    def level(self):
        return self.cheapest or level_of(self.code)

    @property
    def source(self):
        return self.with_source or self.level == "source"


def missed(mutation, named, report):
    """Why this report does not do: nothing found, another code, another place, another level. None when it does."""
    found = [finding for finding in report.findings if finding.code == mutation.code]
    codes = sorted({finding.code for finding in report.findings})
    if not found:
        return f"{mutation.code} found nothing; findings are of {', '.join(codes) or 'no check'}"
    severities = {finding.severity for finding in found if named in said(finding)}
    if not severities:
        return f"no finding of {mutation.code} names {named}: {[said(finding) for finding in found]}"
    if mutation.severity == "error" and "error" not in severities:
        return f"{mutation.code} only warns"
    cheapest = min((level_of(code) for code in codes), key=LEVELS.index)
    if cheapest != mutation.level:
        return f"the level is {cheapest} ({', '.join(codes)}), the registry says {mutation.level}"
    return None


def said(finding):
    """Where a finding says that it is: tensors, file, and the setting that it quotes."""
    where = (finding.tensor or "", *finding.names, Path(finding.file or "").name)
    return " ".join((*where, finding.expected, finding.actual))


def run(mutation, label, starts, work):
    """Why `verify` does not find it as it should in a copy that is broken and removed; None where it does."""
    start = starts.path(label)
    path = Path(shutil.copytree(start, work / "checkpoint"))
    named = mutation.damage(path, mutation.on[label])
    if not mutation.arguments and models.content(path) == models.content(start):
        return "the mutation changed nothing on disk"
    source = starts.source(label) if mutation.source else None
    manifest = starts.manifest(label) if mutation.with_manifest else None
    report = verify(path, source=source, manifest=manifest, **mutation.arguments)
    shutil.rmtree(path)
    return missed(mutation, named if isinstance(named, str) else mutation.on[label], report)


def clean(label, starts):
    """What is found in a sound checkpoint, alone and against its source, and the checks that did not pass."""
    path = starts.path(label)
    reports = [verify(path), verify(path, source=starts.source(label))]
    findings = [finding for report in reports for finding in report.findings]
    return [*findings, *(check for report in reports for check in report.checks if check.status != "passed")]


def runs(mutations):
    return [(mutation, label) for mutation in mutations for label in mutation.on]


def one_each(runs):
    """One run of each code in each kind of checkpoint, so that all checkpoints have their turn."""
    found = {}
    for mutation, label in runs:
        found.setdefault((mutation.code, label.partition("/")[2]), []).append((mutation, label))
    return [choice[place % len(choice)] for place, choice in enumerate(found.values())]


def name_of(run):
    return f"{run[0].name}, {run[1]}"
