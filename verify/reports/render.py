"""Prints a report for people, in a terminal or piped."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ckptkit.core.findings_text import Entry, Line, TextReport, columns, lay_out
from ckptkit.core.printable import printable
from ckptkit.verify.core.check import NOT_APPLICABLE
from ckptkit.verify.core.report import BEHAVIOUR, Finding, Report, anchors, short_codes, split_reason
from ckptkit.verify.evidence.folding import by_key
from ckptkit.verify.reports.text import (
    describe_fault,
    groups,
    headline,
    is_about_checkpoint,
    named_subject,
    names_its_file,
    other_reasons,
    totals,
)

_COLOR = {
    "PASSED": "green",
    "FAILED": "red",
    "INCONCLUSIVE": "yellow",
    "error": "red",
    "warning": "yellow",
}
# Facts that a table of everything has, and that a verdict does without.
_BACKGROUND = ("tensors per layer", NOT_APPLICABLE, "of another model", BEHAVIOUR)


class _Output(Console):
    """A console that says when its reader has gone; rich itself ends the process with 1, which here means findings."""

    def on_broken_pipe(self) -> None:
        """Raises OSError."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def render(report: Report, console: Console | None = None, *, every: bool = False) -> None:
    """Prints the cause in a sentence, findings, the worst first, facts, the checks in a line, and last the verdict.

    `every` adds the table of checks, all details and all facts. Goes to stdout unless a console is given.

    Raises OSError where nobody reads what is printed.
    """
    width = console.width if console else columns()
    console = console or _Output(highlight=False)
    for head, tail in report_lines(report, width, every):
        color = next((color for word, color in _COLOR.items() if word in head), "")
        console.print(Text.assemble((head, f"bold {color}".strip()), tail), soft_wrap=True)


def report_lines(report: Report, width: int, every: bool = False) -> Iterator[Line]:
    """Yields the lines that `render` prints."""
    found = [
        _entry(report, group.title, anchor, finding, every)
        for group in groups(report, len(report.findings))
        for anchor, finding in group.shown
        if every or finding.cause is None
    ]
    # A launch may find no checkpoint.
    where = f"  {report.checkpoint}{f' against {report.source}' if report.source else ''}" if report.checkpoint else ""
    reasons = other_reasons(report)
    sections: dict[str, Sequence[str]] = {"not looked at": reasons} if reasons else {}
    shown = (name for name, lines in report.facts.items() if lines and (every or name not in _BACKGROUND))
    sections |= {name: report.facts[name] for name in shown}
    return lay_out(
        TextReport(
            found,
            (printable(report.verdict), where),
            sections,
            _closing(report, every),
            "--all shows them",
            headline(report),
        ),
        width,
        every,
    )


def _entry(report: Report, title: str, anchor: str, finding: Finding, every: bool) -> Entry:
    tensors = named_subject(finding) if finding.tensor else None
    if finding.tensor and ", " in finding.tensor and not every:
        tensors = f"{finding.tensor.split(', ')[0]} and others ({finding.count} tensors)"
    fields = {
        "tensor": tensors,
        "file": finding.file,
        "rank": finding.rank,
        "expected": finding.expected,
        "actual": finding.actual,
        "next": finding.hint,
        "cause": finding.cause,
        "follows": _explained(report, anchor),
    }
    given = [(label, text) for label, text in fields.items() if text]
    wrong = describe_fault(finding.expected, finding.actual)
    # In few words: a tensor, or how many; else the name of the file, if it is not the checkpoint itself.
    about = f"{finding.count} tensors" if finding.tensor and ", " in finding.tensor else finding.tensor
    if not about and not is_about_checkpoint(finding, report.checkpoint):
        about = Path(str(finding.file)).name
    about = "" if names_its_file(finding) else about or ""
    return Entry(finding.code, finding.severity, about, wrong, given, anchor, title)


def _explained(report: Report, cause: str) -> str:
    """The findings that follow from this one, those that say the same together."""
    named = zip(anchors(report.findings), report.findings, strict=True)
    found = by_key((one.actual, anchor) for anchor, one in named if one.cause == cause)
    counted = {actual: f"{names[0]} and {len(names) - 1} more" for actual, names in found.items() if len(names) > 1}
    return "; ".join(f"{counted.get(actual, names[0])}: {actual}" for actual, names in found.items())


def _closing(report: Report, every: bool) -> list[str]:
    lines = [
        f"{check.code}  {check.status:<7}  {check.seconds:>6.1f} s  {check.tensors_compared:>7}  {check.title}"
        + (f" ({check.reason})" if check.reason else "")
        for check in (report.checks if every else ())
    ]
    if not every:
        told = {split_reason(reason)[0] for reason in report.reasons}
        left_out = (check for check in report.checks if check.status == "skipped" and check.reason not in told)
        skipped = by_key((check.reason or "", check.code) for check in left_out)
        lines += [f"skipped: {short_codes(codes)} ({reason})" for reason, codes in skipped.items()]
    lines.append(totals(report))
    more = [] if every else ["`--all` lists the checks"]
    if report.findings:
        code = groups(report, 1)[0].code
        more.append(f"`ckptkit explain {code}` says what to do about it")
    if more:
        lines.append("; ".join(more))
    return lines
