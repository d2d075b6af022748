"""Markdown, JUnit, SARIF and HTML reports, by hand-written expectations; refusals come before the work."""

import json
import os
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError
from ckptkit.verify.core.report import CheckResult, Finding, Report
from ckptkit.verify.reports import FORMATS, fault_of, report_text

BIAS = "model.layers.{2..11}.mlp.gate.bias"
REPORT = Report(
    version="0.1.0",
    command=("ckptkit", "verify", "/data/a b"),
    checkpoint="/data/a b",
    source="/data/b",
    checks=(
        CheckResult("CK101", "config.json describes a supported model", "passed", None, 3, 0, 0.125),
        CheckResult("CK203", "dtypes | are kept", "failed", None, 10, 480, 1.5),
        CheckResult("CK501", "SGLang loads the checkpoint", "skipped", "sglang is not installed"),
    ),
    findings=(
        Finding("CK203", "float32", "bfloat16", "convert <again>", BIAS, 10, "/data/a b/1.safetensors", "tp0pp1"),
        Finding("CK101", "one \x1b[31mdtype", "two", "look", severity="warning"),
    ),
    facts={"pipeline stages": ["stage 0: layers {0..5}"]},
)


def test_markdown():
    lines = report_text(REPORT, ".md").splitlines()
    assert lines[:9] == [
        "# ckptkit: FAILED with 1 error and 1 warning",
        "",
        "**Bias of router of layers 2 to 11: bfloat16 instead of float32.**",
        "",
        "`/data/a b` against `/data/b`",
        "",
        "- error **CK203-1** `model.layers.{2..11}.mlp.gate.bias (10 tensors)`: bfloat16",
        "- warning **CK101-1** two",
        "",
    ]
    assert "<summary>3 checks: 1 passed, 1 failed, 1 skipped; 13 comparisons, 480 bytes</summary>" in lines
    assert lines[-1] == "**FAILED with 1 error and 1 warning**"
    assert "| CK203 | dtypes \\| are kept | failed | 10 | 1.5 |" in lines
    assert "| CK501 | SGLang loads the checkpoint (sglang is not installed) | skipped | 0 | 0.0 |" in lines
    start = lines.index("## CK203 error: dtypes \\| are kept")
    assert lines[start + 2 : start + 8] == [
        "- **CK203-1** `model.layers.{2..11}.mlp.gate.bias` (10 tensors)",
        "  - file: `/data/a b/1.safetensors`",
        "  - rank: tp0pp1",
        "  - expected: float32",
        "  - actual: bfloat16",
        "  - next: convert \\<again\\>",
    ]
    assert "  - expected: one \\\\x1b\\[31mdtype" in lines


def test_junit():
    suite = ElementTree.fromstring(report_text(REPORT, ".xml")).find("testsuite")  # noqa: S314 - our own
    keys = ("tests", "failures", "errors", "skipped", "time")
    assert [suite.get(key) for key in keys] == ["3", "1", "0", "1", "1.625"]
    passed, failed, skipped = suite.findall("testcase")
    name = "CK101 config.json describes a supported model"
    assert (passed.get("classname"), passed.get("name"), passed.get("time")) == ("ckptkit.files", name, "0.125")
    assert (passed.find("failure"), passed.findtext("system-out")) == (
        None,
        "CK101-1 warning\n  expected: one \\x1b[31mdtype\n  actual: two\n  next: look",
    )
    failure = failed.find("failure")
    text = failure.text
    about = "model.layers.{2..11}.mlp.gate.bias (10 tensors): bfloat16"
    assert (failure.get("type"), failure.get("message")) == ("CK203", about)
    two = replace(REPORT, findings=[REPORT.findings[0]] * 2)
    (failure,) = ElementTree.fromstring(report_text(two, ".xml")).iter("failure")  # noqa: S314 - our own
    assert failure.get("message") == f"{about} (and 1 more finding)"
    assert text == (
        "CK203-1 error: model.layers.{2..11}.mlp.gate.bias (10 tensors)\n  file: /data/a b/1.safetensors\n"
        "  rank: tp0pp1\n"
        "  expected: float32\n  actual: bfloat16\n  next: convert <again>"
    )
    reason = skipped.find("skipped")
    assert reason.get("message") == "sglang is not installed"


def test_a_finding_of_a_launch_is_at_its_line_or_at_the_script():
    findings = (Finding("CK718", "4", "8, at /x/model.sh:41", "h", file="/x/model.sh"), Finding("CK718", "4", "8", "h"))
    launched = replace(REPORT, command=("ckptkit", "preflight"), findings=findings, launch="/x/run.sh")
    results = json.loads(report_text(launched, ".sarif"))["runs"][0]["results"]
    places = [one["locations"][0]["physicalLocation"] for one in results]
    assert [(one["artifactLocation"]["uri"], one["region"]) for one in places] == [
        ("file:///x/model.sh", {"startLine": 41}),
        ("file:///x/run.sh", {"startLine": 1}),
    ]
    assert "<title>failed: /x/run.sh</title>" in report_text(launched, ".html")


def test_sarif():
    content = json.loads(report_text(REPORT, ".sarif"))
    assert (content["version"], len(content["runs"])) == ("2.1.0", 1)
    (run,) = content["runs"]
    assert run["tool"]["driver"]["name"] == "ckptkit"
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["CK101", "CK203", "CK501"]
    assert all(rule["help"]["text"] and rule["fullDescription"]["text"] for rule in run["tool"]["driver"]["rules"])
    assert run["invocations"] == [
        {
            "executionSuccessful": True,
            "arguments": ["verify", "/data/a b"],
            "toolExecutionNotifications": [
                {
                    "level": "note",
                    "message": {"text": "CK501 was skipped: sglang is not installed"},
                    "associatedRule": {"id": "CK501"},
                }
            ],
        }
    ]
    assert run["results"][0] == {
        "ruleId": "CK203",
        "ruleIndex": 1,
        "level": "error",
        "message": {
            "text": "model.layers.{2..11}.mlp.gate.bias (10 tensors): expected float32, found bfloat16 on rank tp0pp1. "
            "Next: convert <again>"
        },
        "locations": [
            {
                "physicalLocation": {"artifactLocation": {"uri": "file:///data/a%20b/1.safetensors"}},
                "logicalLocations": [{"fullyQualifiedName": "model.layers.{2..11}.mlp.gate.bias", "kind": "object"}],
            }
        ],
        "properties": {"anchor": "CK203-1", "count": 10},
    }
    assert run["results"][1]["level"] == "warning"


# What stands under these names in checkpoints and projects, and is not a report.
PRECIOUS = {
    ".json": '{"model_type": "qwen3", "schema": "ckptkit-report/2"}',
    ".md": "# ckptkit: the notes of a user who PASSED\n",
    ".xml": '<?xml version="1.0"?>\n<testsuites>\n  <testsuite name="pytest" tests="1">\n',
    ".sarif": '{"$schema": "https://x", "version": "2.1.0", "runs": [{"tool": {"driver": {"name": "CodeQL"}}}]}',
    ".html": '<!DOCTYPE html>\n<html lang="en">\n<title>passed: the exam</title>\n',
}


def test_html_needs_nothing_else_and_json_is_what_the_command_prints():
    """test_report_page.py looks at the page in a browser."""
    page = report_text(REPORT, ".html")
    assert "default-src 'none'" in page
    assert not any(mark in page for mark in ("http://", "https://", " src=", "<link", "\x1b"))
    assert "convert &lt;again&gt;" in page
    assert 'id="CK203-1"' in page
    assert json.loads(report_text(REPORT, ".json")) == REPORT.to_json()


@pytest.mark.parametrize("ending", FORMATS)
def test_report_over_a_report_or_nothing_is_written_whole(ending, tmp_path):
    path = tmp_path / f"report{ending}"
    (tmp_path / f"report{ending}.partial").write_text("precious")
    text = report_text(REPORT, ending)
    for before in (None, "", text, report_text(replace(REPORT, checks=(), findings=()), ending)):
        if before is not None:
            path.write_text(before, encoding="utf-8")
        REPORT.write(str(path))
        assert path.read_text(encoding="utf-8") == text
    assert {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()} == {
        path.name: text,
        f"{path.name}.partial": "precious",
    }
    # A report of one format is none of another.
    for other in FORMATS:
        (tmp_path / f"moved{other}").write_text(text, encoding="utf-8")
        assert (fault_of(tmp_path / f"moved{other}") is None) == (other == ending)


@pytest.mark.parametrize(("umask", "left"), [(0o077, 0o600), (0o022, 0o644)])
def test_a_report_has_the_permissions_that_the_umask_leaves(umask, left, tmp_path):
    before = os.umask(umask)
    try:
        for ending in FORMATS:
            REPORT.write(tmp_path / f"report{ending}")
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {left}


@pytest.mark.parametrize("ending", FORMATS)
def test_report_over_a_file_that_is_no_report_is_refused(ending, tmp_path):
    precious, path = tmp_path / "precious", tmp_path / f"report{ending}"
    precious.write_text(PRECIOUS[ending])
    for link in (Path.symlink_to, Path.hardlink_to):
        path.unlink(missing_ok=True)
        link(path, precious)
        with pytest.raises(CkptkitError, match=f"not a {ending} report of ckptkit"):
            REPORT.write(path)
        assert (path.read_text(), precious.read_text()) == (PRECIOUS[ending], PRECIOUS[ending])


@pytest.mark.parametrize("verb", [["verify"], ["preflight", "--hf-checkpoint"]])
def test_report_onto_a_file_of_the_checkpoint_is_refused_before_the_work(verb, fresh, tmp_path):
    model = fresh("qwen2-tied")
    (model / "ckptkit.json").write_text('{"schema": "ckptkit-manifest/2"}')
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    (tmp_path / "report.json").symlink_to(model / "config.json")
    names = ["config.json", "model.safetensors.index.json", "ckptkit.json", "tokenizer.json", "generation_config.json"]
    for path in (*(model / name for name in names), tmp_path / "report.json"):
        result = CliRunner().invoke(cli, [*verb, str(model), "--report", str(path)])
        assert (result.exit_code, result.stdout) == (2, "")
        assert path.name in result.stderr
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before


@pytest.mark.parametrize(("name", "why"), [("report.txt", "one of .json"), ("no/report.md", "directory")])
def test_what_cannot_be_written_is_refused_before_the_work(name, why, tmp_path):
    result = CliRunner().invoke(cli, ["verify", str(tmp_path / "nothing here"), "--report", str(tmp_path / name)])
    assert (result.exit_code, why in " ".join(result.output.replace("│", " ").split())) == (2, True)
    assert list(tmp_path.iterdir()) == []
