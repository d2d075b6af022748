"""A report for people (in a terminal or piped) and for programs (JSON)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from verify.report import Finding, Report

_COLOR = {"passed": "green", "failed": "red", "skipped": "yellow", "error": "red", "warning": "yellow"}


def render(report: Report, console: Console | None = None) -> None:
    """Prints status, checks, findings and facts; to standard output unless a console is given."""
    console = console or Console(highlight=False)
    counts = report.to_json()["counts"]
    source = f" against {report.source}" if report.source else ""
    console.print(Text.assemble((report.status.upper(), f"bold {_COLOR[report.status]}"), f"  {report.checkpoint}{source}"), soft_wrap=True)
    totals = f"{counts['checks']} checks: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
    console.print(f"{totals}; {counts['tensors_compared']} comparisons, {_size(counts['bytes_compared'])}\n")
    console.print(_table(report))
    for severity in ("error", "warning"):
        found = [finding for finding in report.findings if finding.severity == severity]
        for code, group in _by_code(found).items():
            console.print(Text.assemble(("\n" + code, f"bold {_COLOR[severity]}"), f" {severity}: ", _title(report, code)))
            for finding in group:
                _finding(console, finding)
    for name, lines in report.facts.items():
        console.print(f"\n[bold]{escape(name)}[/bold]")
        for line in lines:
            console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))


def _table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("code", no_wrap=True)
    table.add_column("check")
    table.add_column("status", no_wrap=True)
    table.add_column("compared", justify="right", no_wrap=True)
    table.add_column("s", justify="right", no_wrap=True)
    for check in report.checks:
        title = check.title if check.reason is None else f"{check.title} ({check.reason})"
        status = Text(check.status, style=_COLOR[check.status])
        table.add_row(check.code, Text(title), status, str(check.tensors_compared), f"{check.seconds:.1f}")
    return table


def _by_code(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    groups: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        groups[finding.code].append(finding)
    return groups


def _title(report: Report, code: str) -> str:
    return next((check.title for check in report.checks if check.code == code), "")


def _finding(console: Console, finding: Finding) -> None:
    count = f" ({finding.count} tensors)" if finding.count > 1 else ""
    lines = {
        "tensor": f"{finding.tensor}{count}" if finding.tensor else None,
        "file": finding.file,
        "rank": finding.rank,
        "expected": finding.expected,
        "actual": finding.actual,
        "next": finding.hint,
    }
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, min_width=9)
    grid.add_column(overflow="fold")
    for label, value in lines.items():
        if value:
            grid.add_row(label, Text(value))
    console.print(Padding(grid, (0, 0, 1, 2), expand=False))


def _size(nbytes: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} bytes"
