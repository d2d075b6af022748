"""A report for people (in a terminal or piped) and for programs (JSON)."""

from __future__ import annotations

import errno
import os

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ckptkit.core.printable import printable
from verify.report import Finding, Report
from verify.reports.text import groups, rest, totals

_COLOR = {
    "passed": "green",
    "failed": "red",
    "inconclusive": "yellow",
    "skipped": "yellow",
    "error": "red",
    "warning": "yellow",
}
_SHOWN = 20  # findings of one code


class _Output(Console):
    """A console that says when its reader has gone; rich itself ends the process with 1, which here means findings."""

    def on_broken_pipe(self) -> None:
        """Raises OSError."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def render(report: Report, console: Console | None = None) -> None:
    """Prints status, checks, the first findings of each code, and facts; to stdout unless a console is given.

    Raises OSError."""
    console = console or _Output(highlight=False)
    source = f" against {report.source}" if report.source else ""
    console.print(
        Text.assemble((report.verdict, f"bold {_COLOR[report.status]}"), printable(f"  {report.checkpoint}{source}")),
        soft_wrap=True,
    )
    for reason in report.reasons:
        console.print(Padding(Text(printable(f"not looked at: {reason}")), (0, 0, 0, 2), expand=False))
    console.print(Text(f"{totals(report)}\n"))
    console.print(_table(report))
    for group in groups(report, _SHOWN):
        console.print(
            Text.assemble(
                ("\n" + group.code, f"bold {_COLOR[group.severity]}"), f" {group.severity}: ", printable(group.title)
            )
        )
        for _, finding in group.shown:
            _finding(console, finding)
        if group.more:
            console.print(Padding(Text(f"… {rest(group)}"), (0, 0, 1, 2), expand=False))
    for name, lines in report.facts.items():
        console.print(Text(f"\n{printable(name)}", "bold"))
        for line in lines:
            console.print(Padding(Text(printable(line)), (0, 0, 0, 2), expand=False))


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
        table.add_row(check.code, Text(printable(title)), status, str(check.tensors_compared), f"{check.seconds:.1f}")
    return table


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
            grid.add_row(label, Text(printable(value)))
    console.print(Padding(grid, (0, 0, 1, 2), expand=False))
