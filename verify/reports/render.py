"""Prints a report for people."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ckptkit.core.findings_text import Entry, Line, TextReport, columns, detailed, lay_out, plain
from ckptkit.core.printable import printable
from ckptkit.verify.core.check import NOT_APPLICABLE, all_checks
from ckptkit.verify.core.report import BEHAVIOUR, Finding, Report, anchors, short_codes, split_reason
from ckptkit.verify.evidence.folding import by_key
from ckptkit.verify.reports import text as wording

_COLOR = {"PASSED": "green", "FAILED": "red", "INCONCLUSIVE": "yellow", "error": "red", "warning": "yellow"}
_BACKGROUND = ("tensors per layer", NOT_APPLICABLE, "of another model", BEHAVIOUR)  # facts for all details only


class _Output(Console):
    """A console that raises if its pipe is closed; rich exits with 1, which here means findings."""

    def on_broken_pipe(self) -> None:
        """Raises OSError."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def render(report: Report, console: Console | None = None, *, every: bool = False) -> None:
    """Prints the report, with the table of checks, all details and all facts if `every`. Raises OSError."""
    width = console.width if console else columns()
    console = console or _Output(highlight=False)
    for head, tail in report_lines(report, width, every):
        color = next((color for word, color in _COLOR.items() if word in head), "")
        console.print(Text.assemble((head, f"bold {color}".strip()), tail), soft_wrap=True)


def report_lines(report: Report, width: int, every: bool = False) -> Iterator[Line]:
    """Yields the lines that `render` prints."""
    entries = [
        _entry(report, group.title, anchor, finding, every)
        for group in wording.groups(report, len(report.findings))
        for anchor, finding in group.shown
        if every or finding.cause is None
    ]
    # A launch may find no checkpoint.
    where = f"  {report.checkpoint}{f' against {report.source}' if report.source else ''}" if report.checkpoint else ""
    reasons = wording.other_reasons(report)
    sections: dict[str, Sequence[str]] = {"not looked at": reasons} if reasons else {}
    sections |= {name: lines for name, lines in report.facts.items() if lines and (every or name not in _BACKGROUND)}
    verdict, closing = (printable(report.verdict), where), _closing(report, every)
    text = TextReport(entries, verdict, sections, closing, "--all shows them", wording.headline(report))
    return lay_out(text, width, every)


def _entry(report: Report, title: str, anchor: str, finding: Finding, every: bool) -> Entry:
    tensors = wording.named_subject(finding) if finding.tensor else None
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
    details = [(label, text) for label, text in fields.items() if text]
    fault = wording.describe_fault(finding.expected, finding.actual)
    # In few words: a tensor, or their number; else the name of the file, if it is not the checkpoint itself.
    about = f"{finding.count} tensors" if finding.tensor and ", " in finding.tensor else finding.tensor
    if not about and not wording.is_about_checkpoint(finding, report.checkpoint):
        about = Path(str(finding.file)).name
    about = "" if wording.names_its_file(finding) else about or ""
    return Entry(finding.code, finding.severity, about, fault, details, anchor, title)


def finding_lines(finding: Finding) -> Iterator[str]:
    """Yields the lines of one finding, as `render` prints them."""
    title = next((check.failed for check in all_checks() if check.code == finding.code), "")
    report = Report("", (), "", None, (), [finding], {})
    return plain(detailed(_entry(report, title, finding.code, finding, every=True), columns()))


def _explained(report: Report, cause: str) -> str:
    """The findings that follow from this one, identical ones together."""
    named = zip(anchors(report.findings), report.findings, strict=True)
    follows = by_key((one.actual, anchor) for anchor, one in named if one.cause == cause)
    counts = {actual: f" and {len(names) - 1} more" if len(names) > 1 else "" for actual, names in follows.items()}
    return "; ".join(f"{names[0]}{counts[actual]}: {actual}" for actual, names in follows.items())


def _closing(report: Report, every: bool) -> list[str]:
    lines = [
        f"{check.code}  {check.status:<7}  {check.seconds:>6.1f} s  {check.tensors_compared:>7}  {check.title}"
        + (f" ({check.reason})" if check.reason else "")
        for check in (report.checks if every else ())
    ]
    if not every:
        reported = {split_reason(reason)[0] for reason in report.reasons}
        unreported = (check for check in report.checks if check.status == "skipped" and check.reason not in reported)
        skipped = by_key((check.reason or "", check.code) for check in unreported)
        lines += [f"skipped: {short_codes(codes)} ({reason})" for reason, codes in skipped.items()]
    lines.append(wording.totals(report))
    more = [] if every else ["`--all` lists the checks"]
    if report.is_uncompared and report.status == "passed":
        command = shlex.join(["ckptkit", "verify", report.checkpoint, "--source", "RELEASE"])
        more.insert(0, f"`{command}` compares weights, config and tokenizer")
    if report.findings:
        more.append(f"`ckptkit explain {wording.groups(report, 1)[0].code}` says what to do about it")
    return [*lines, *(["; ".join(more)] if more else [])]
