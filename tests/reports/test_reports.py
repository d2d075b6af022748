"""Each public report is found by its command, its sound twin is silent, and lab/reports.md says what is found."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from mutations.starts import Starts
from support.nightly import daily

from reports import REPORTS
from reports.report import Report
from reports.running import Said, make, missed, run
from reports.sizes import MODELS
from reports.table import DOCUMENT, page

_OF_CODE = {report.code: [one for one in REPORTS if one.code == report.code] for report in REPORTS if report.code}
DAILY = [report for report in REPORTS if not report.code or report == _OF_CODE[report.code][-1]]  # the last of a check
_SAID: dict[tuple[object, ...], Said] = {}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """The sound checkpoints, each made at its first use."""
    return Starts(tmp_path_factory.mktemp("starts"), MODELS)


def of_sound_twin(report: Report, work: Path) -> Said:
    """What the command says of the sound case; reports that share it ask once."""
    key = (report.twin or report.command, report.start, report.prepare)
    if key not in _SAID:
        _SAID[key] = run(report.twin or report.command, work)
    return _SAID[key]


@pytest.mark.usefixtures("kernel_tiles")
@pytest.mark.parametrize("report", daily(REPORTS, DAILY), ids=lambda report: report.key)
def test_report_is_found_and_its_sound_twin_is_silent(report: Report, starts: Starts, tmp_path: Path) -> None:
    work = make(report, starts, tmp_path / "case")
    if report.verdict == "named":
        said = run(report.command, work)
        assert (said.code, {finding["code"] for finding in said.findings}) == (
            (1, {report.code}) if report.code else (2, set())
        )
        assert all(name in said.text for name in report.names), said.text
        return
    twin = of_sound_twin(report, work)
    assert (twin.code, twin.findings) == (0, []), twin.text
    if report.verdict == "sound":
        return
    assert report.damage or report.twin
    if report.damage is not None:
        report.damage(work)
    why = missed(report, run(report.command, work))
    assert (why is None) == (report.verdict == "found"), why


def test_reports_are_of_the_year_and_of_these_verdicts() -> None:
    count = Counter(report.verdict for report in REPORTS)
    assert len(REPORTS) >= 45
    assert len({report.thread for report in REPORTS}) == len(REPORTS)
    assert all("2025-08" <= report.month <= "2026-09" for report in REPORTS)
    assert all(bool(report.reason) == (report.verdict != "found") for report in REPORTS)
    assert count["missed"] * 9 <= sum(report.verdict != "missed" for report in REPORTS)


def test_page_is_made_of_the_reports() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == page()
    assert len(re.findall(r"^\| \[", text, re.MULTILINE)) == len(REPORTS)
