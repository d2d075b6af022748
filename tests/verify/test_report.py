"""The report as data, as JSON (a contract) and as text."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from verify.checks import Check, Skip, Tally, run_checks
from verify.render import render
from verify.report import CheckResult, Finding, Report
from verify.run import verify
from verify.subject import Subject

Make = Callable[..., Path]
Copy = Callable[[Path], Path]

FINDING = Finding(
    "CK203", "float32", "bfloat16", "convert again", "model.layers.{2..11}.mlp.gate.e_score_correction_bias", 10, "/data/model-00001.safetensors", "tp0pp1"
)
REPORT = Report(
    version="0.1.0",
    command=("ckptkit", "verify", "/data/a"),
    checkpoint="/data/a",
    source="/data/b",
    checks=(
        CheckResult("CK101", "config", "passed", None, 3, 0, 0.125),
        CheckResult("CK203", "dtypes", "failed", None, 10, 480, 1.5),
        CheckResult("CK501", "engine", "skipped", "sglang is not installed"),
    ),
    findings=(FINDING, Finding("CK107", "one dtype", "two", "look", severity="warning")),
    facts={"pipeline stages": ["stage 0: layers {0..5}", "stage 1: layers {6..11}"]},
)


def test_json_is_the_contract() -> None:
    content = json.loads(json.dumps(REPORT.to_json()))
    assert content["schema"] == "ckptkit-report/1"
    assert content["version"] == "0.1.0"
    assert content["command"] == ["ckptkit", "verify", "/data/a"]
    assert content["checkpoint"] == "/data/a"
    assert content["source"] == "/data/b"
    assert content["status"] == "failed"
    assert content["counts"] == {"checks": 3, "passed": 1, "failed": 1, "skipped": 1, "tensors_compared": 13, "bytes_compared": 480}
    assert content["checks"] == [
        {"code": "CK101", "title": "config", "status": "passed", "reason": None, "tensors_compared": 3, "seconds": 0.125},
        {"code": "CK203", "title": "dtypes", "status": "failed", "reason": None, "tensors_compared": 10, "seconds": 1.5},
        {"code": "CK501", "title": "engine", "status": "skipped", "reason": "sglang is not installed", "tensors_compared": 0, "seconds": 0.0},
    ]
    assert content["findings"] == [
        {
            "code": "CK203",
            "severity": "error",
            "tensor": "model.layers.{2..11}.mlp.gate.e_score_correction_bias",
            "count": 10,
            "file": "/data/model-00001.safetensors",
            "rank": "tp0pp1",
            "expected": "float32",
            "actual": "bfloat16",
            "hint": "convert again",
        },
        {
            "code": "CK107",
            "severity": "warning",
            "tensor": None,
            "count": 1,
            "file": None,
            "rank": None,
            "expected": "one dtype",
            "actual": "two",
            "hint": "look",
        },
    ]
    assert content["facts"] == {"pipeline stages": ["stage 0: layers {0..5}", "stage 1: layers {6..11}"]}
    assert set(content) == {"schema", "version", "command", "checkpoint", "source", "status", "counts", "checks", "findings", "facts", "heat"}


def test_a_real_report_keeps_the_contract(releases: Make, converted: Make) -> None:
    content = json.loads(json.dumps(verify(converted("qwen2-tied"), source=releases("qwen2-tied"), command=["ckptkit", "verify"]).to_json()))
    assert (content["status"], content["findings"], content["command"]) == ("passed", [], ["ckptkit", "verify"])
    assert content["source"] == str(releases("qwen2-tied"))
    assert {check["status"] for check in content["checks"]} == {"passed"}
    assert all(check["tensors_compared"] > 0 for check in content["checks"])
    assert content["counts"]["checks"] == len(content["checks"]) == content["counts"]["passed"]
    assert content["version"][0].isdigit()


def test_warnings_alone_pass() -> None:
    checks = (CheckResult("CK107", "dtypes", "passed"),)
    warned = replace(REPORT, checks=checks, findings=(REPORT.findings[1],))
    assert warned.status == "passed"
    assert replace(warned, findings=REPORT.findings).status == "failed"


def nothing(subject: Subject, tally: Tally) -> Iterator[Finding]:
    yield from ()


def skipping(subject: Subject, tally: Tally) -> Iterator[Finding]:
    raise Skip("no GPU")
    yield


def failing(subject: Subject, tally: Tally) -> Iterator[Finding]:
    tally.compared(8)
    yield Finding("CK102", "a", "b", "c")


def test_a_check_that_compared_nothing_fails() -> None:
    results, findings, _ = run_checks(Subject(Path("x")), [Check("CK999", "t", "r", "f", nothing)])
    assert [result.status for result in results] == ["failed"]
    assert [finding.code for finding in findings] == ["CK999"]


def test_a_skip_keeps_its_reason_and_headers_that_fail_skip_the_rest() -> None:
    checks = [Check(code, "t", "r", "f", run) for code, run in [("CK101", skipping), ("CK102", failing), ("CK201", failing), ("CK701", failing)]]
    results, _, _ = run_checks(Subject(Path("x")), checks)
    assert [(result.status, result.reason) for result in results] == [
        ("skipped", "no GPU"),
        ("failed", None),
        ("skipped", "not run because CK102 failed"),
        ("failed", None),
    ]


def text_of(report: Report, width: int | None = 80) -> str:
    stream = io.StringIO()
    render(report, Console(file=stream, width=width, highlight=False))
    return stream.getvalue()


def test_text_says_status_first_and_everything_else_below() -> None:
    text = text_of(REPORT)
    lines = text.splitlines()
    assert lines[0] == "FAILED  /data/a against /data/b"
    assert lines[1] == "3 checks: 1 passed, 1 failed, 1 skipped; 13 comparisons, 480 bytes"
    order = ["CK101", "CK203", "CK501", "CK203 error: dtypes", "CK107 warning:", "pipeline stages", "stage 1: layers {6..11}"]
    places = [text.index(part, 40) for part in order]
    assert places == sorted(places)
    for part in ("sglang is not installed", "(10 tensors)", "tp0pp1", "float32", "bfloat16", "convert again", "/data/model-00001.safetensors"):
        assert part in text


def test_text_fits_eighty_columns_and_loses_nothing(releases: Make, copy_of: Copy) -> None:
    path = copy_of(releases("glm4_moe"))
    shard = sorted(path.glob("*.safetensors"))[4]
    os.truncate(shard, shard.stat().st_size - 1)
    report = verify(path)
    text = text_of(report)
    assert all(len(line) <= 80 for line in text.splitlines()[1:])
    joined = "".join(text.split())
    for finding in report.findings:
        for part in (finding.expected, finding.actual, finding.hint, finding.file or ""):
            assert "".join(part.split()) in joined
    assert "\x1b" not in text


def test_text_is_plain_when_piped(capsys: pytest.CaptureFixture[str]) -> None:
    render(REPORT)
    out = capsys.readouterr().out
    assert out.startswith("FAILED  /data/a")
    assert "\x1b" not in out


def test_brackets_in_messages_are_no_markup() -> None:
    finding = Finding("CK105", "shape [12, 128]", "shape [/bold] [11, 128]", "look")
    text = text_of(replace(REPORT, findings=(finding,), facts={"[red]": ["[12]"]}))
    assert "shape [/bold] [11, 128]" in text
    assert "[red]" in text
    assert "[12]" in text
