"""lab/reports.md, made of the reports: `make reports` writes it, a test compares it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from reports import REPORTS
from reports.report import Report, Verdict

DOCUMENT = Path(__file__).resolve().parents[2] / "lab" / "reports.md"
_INTRODUCTION = """# Public bug reports, rebuilt
What ckptkit says of bugs that others have had. Each row is a public issue or pull request of {first} to {last} in which
weights, a config or a launch went wrong between HF, Megatron, INT4 and an engine, mostly silently. It is rebuilt as a
small case, and once more as a **sound twin**, which has everything of it but the fault.
`tests/reports/test_reports.py` runs the command on both: the case must be found with the code, in words that name what
it turned out to be, and in the twin nothing may be found. `make test` does this for one of each check and for the
sound cases, `make test-nightly` for all. This page is made of the same table.

| of {all} reports | |
| --- | --- |
| found, by the command in its row | {found} |
| missed | {missed} |
| a format, model or launch that the command names, and does not judge | {named} |
| the checkpoint is right and a reader was wrong, so that nothing may be found | {sound} |
| false alarms on the {twins} sound twins | 0 |

What was missed or failed wrongly was mended, so the table does not say how many of other reports would be found. Of 70
faults that were chosen on 2026-11-28 before any was tried, 45 were found at first, and five of the sound cases among
them were failed at first.

No report was found only by a check that is retired (CK119, CK212, CK405, CK604, CK605), by the parts of CK309 and CK606
that are (tiles of a kernel, parts of a model), or by the rule of CK304 for one release of transformers.

Threads of which nothing is in a file are in [reports-not-rebuilt.md](reports-not-rebuilt.md).

Threads are cited as `repository#number`, as in [failure-modes.md](failure-modes.md). `CKPT` is the checkpoint,
`RELEASE` what it was made from. A check is given by its code (`ckptkit explain CODE`); of `lint`, by the kind of its
finding.
"""
_PARTS: tuple[tuple[Verdict, str, str], ...] = (
    ("found", "Found", "check"),
    ("missed", "Missed", "why"),
    ("named", "Named, and not judged", "why"),
    ("sound", "Sound", "why"),
)


def page() -> str:
    """The page in Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    months = [report.month for report in REPORTS]
    counts = {verdict: len(_of(verdict)) for verdict, _, _ in _PARTS}
    yield _INTRODUCTION.format(
        first=min(months),
        last=max(months),
        all=len(REPORTS),
        twins=sum(report.verdict in ("found", "missed", "sound") for report in REPORTS),
        **counts,
    )
    for verdict, title, last in _PARTS:
        if reports := _of(verdict):
            yield from (f"## {title}", *_table(reports, last), "")


def _of(verdict: Verdict) -> list[Report]:
    return [report for report in REPORTS if report.verdict == verdict]


def _table(reports: Sequence[Report], last: str) -> Iterator[str]:
    yield _row("report", "month", "what it was", "command", last)
    yield _row(*["---"] * 5)
    for report in reports:
        link, command = f"[{report.thread}]({report.url})", f"`{report.command}`"
        yield _row(link, report.month, report.what, command, report.reason or report.code)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    """Writes the page."""
    DOCUMENT.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
