"""Runs one mutation on one checkpoint: a copy is broken and verified. Used by the tests and by the report."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutations.mutation import Mutation, missed
from mutations.starts import Starts
from verify.report import CheckResult, Finding, Report
from verify.run import verify

Run = tuple[Mutation, str]


@dataclass(frozen=True)
class Outcome:
    """What became of a mutation: `missed` says why `verify` did not find it as it should; None when it did."""

    report: Report
    missed: str | None


def run(mutation: Mutation, label: str, starts: Starts, work: Path) -> Outcome:
    """Breaks a copy of the checkpoint in the empty directory `work` and verifies it. The copy is removed."""
    start = starts.path(label)
    path = Path(shutil.copytree(start, work / "checkpoint"))
    named = mutation.damage(path, mutation.on[label]) or mutation.on[label]
    changed = bool(mutation.arguments) or differ(path, start)
    source = starts.source(label) if mutation.source else None
    report = verify(
        path, source=source, manifest=starts.manifest(label) if mutation.with_manifest else None, **mutation.arguments
    )
    shutil.rmtree(path)
    return Outcome(report, missed(mutation, named, report) if changed else "the mutation changed nothing on disk")


def clean(label: str, starts: Starts) -> list[Finding | CheckResult]:
    """What is found in a sound checkpoint, alone and against its source, and the checks that did not pass."""
    path = starts.path(label)
    reports = [verify(path), verify(path, source=starts.source(label))]
    return [
        one
        for report in reports
        for one in (*report.findings, *(check for check in report.checks if check.status != "passed"))
    ]


def differ(one: Path, other: Path) -> bool:
    """Whether two directories hold other files, or a file of another content."""
    names = sorted(file.relative_to(one) for file in one.rglob("*") if file.is_file())
    if names != sorted(file.relative_to(other) for file in other.rglob("*") if file.is_file()):
        return True
    return any((one / name).read_bytes() != (other / name).read_bytes() for name in names)


def runs(mutations: Sequence[Mutation], kinds: Sequence[str]) -> list[Run]:
    """Every mutation with every checkpoint of these kinds that it is for."""
    return [(mutation, label) for mutation in mutations for label in mutation.on if label.partition("/")[2] in kinds]


def one_each(runs: Iterable[Run]) -> list[Run]:
    """One run of each mutation, so that all checkpoints have their turn."""
    found: dict[str, list[Run]] = {}
    for mutation, label in runs:
        found.setdefault(mutation.name, []).append((mutation, label))
    return [choice[place % len(choice)] for place, choice in enumerate(found.values())]


def name_of(run: Run) -> str:
    return f"{run[0].name}, {run[1]}"
