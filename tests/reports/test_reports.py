"""Each public report is found by its command, its sound twin is silent, as lab/reports.md says."""

import pytest
from mutations.starts import Starts
from support.nightly import daily

from reports import CASES, REPORTS
from reports.running import make, missed, run
from reports.sizes import MODELS

SLOW = ("sglang#39510", "vllm#57792")  # of checks that tests/verify/checks/test_packed_scheme.py runs
_LAST = {report.code: report for report in REPORTS if report.code and report.thread not in SLOW}
# The last of each check, a third of those in which nothing is found, and those of which no other test has the case.
DAILY = [*_LAST.values(), *[one for one in REPORTS if not one.code][::3]]
ALONE = ("vllm#53709", "ms-swift#7628", "slime#2104", "compressed-tensors#846")
DAILY += [one for one in REPORTS if one.thread in ALONE and one not in DAILY]
_SAID = {}


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    return Starts(tmp_path_factory.mktemp("starts"), MODELS)


def of_sound_twin(report, work):
    key = (report.case.twin or report.command, report.case.start, report.case.prepare)
    if key not in _SAID:
        _SAID[key] = run(report.case.twin or report.command, work)
    return _SAID[key]


@pytest.mark.usefixtures("kernel_tiles", "peft_here")
@pytest.mark.parametrize("report", daily(REPORTS, DAILY), ids=lambda report: report.key)
def test_report_is_found_and_its_sound_twin_is_silent(report, starts, tmp_path):
    work = make(report.case, starts, tmp_path / "case")
    if report.verdict == "named":
        said = run(report.command, work)
        assert (said.code, said.findings) == (2, [])
        assert all(name in said.text for name in report.case.names), said.text
        return
    twin = of_sound_twin(report, work)
    assert (twin.code, twin.findings) == (0, []), twin.text
    if report.verdict == "sound":
        return
    assert report.case.damage or report.case.twin
    if report.case.damage is not None:
        report.case.damage(work)
    why = missed(report, run(report.command, work))
    assert (why is None) == (report.verdict == "found"), why


def test_every_case_has_a_row():
    assert sorted(report.thread for report in REPORTS) == sorted(CASES)
    assert {report.verdict for report in REPORTS} <= {"found", "missed", "named", "sound"}
