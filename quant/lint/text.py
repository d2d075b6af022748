"""Formats a lint report as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from quant.lint.lint import LintReport
from quant.lint.rules import LintFinding

_SHOWN = 4  # folded tensors in a line


def lines(report: LintReport) -> Iterator[str]:
    """Yields the table of entries, the findings, and the portable list where it differs."""
    yield f"{report.path}: {report.packed} of {report.tensors} matrices are INT4 (names from {report.names})"
    for pattern, covers in report.patterns.items():
        yield f"  {pattern}"
        yield from _row(covers)
    for finding in report.findings:
        yield from _finding(finding)
    if report.fixed:
        yield "fixed: config.json has the list below; the original is config.json.orig"
    if report.portable is None:
        yield "no ignore list makes all readers agree on what is packed"
    elif report.portable != tuple(report.patterns):
        yield "portable ignore list:"
        yield from (f"  {entry}" for entry in report.portable)
    if not report.findings:
        yield "all readers agree"


def _row(covers: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yields what an entry covers, with one line for readers that agree."""
    readers: dict[tuple[str, ...], list[str]] = {}
    for reader, tensors in covers.items():
        readers.setdefault(tuple(tensors), []).append(reader)
    for tensors, who in readers.items():
        yield f"      {', '.join(who)}: {_shortened(tensors)}"


def _finding(finding: LintFinding) -> Iterator[str]:
    yield f"{finding.severity}: {finding.message} [{finding.kind}]"
    if finding.tensors:
        yield f"  {_shortened(finding.tensors)} ({finding.count} tensors)"
    yield f"  next: {finding.hint}"


def _shortened(tensors: Sequence[str]) -> str:
    rest = len(tensors) - _SHOWN
    return (", ".join(tensors[:_SHOWN]) or "nothing") + (f" and {rest} more" if rest > 0 else "")
