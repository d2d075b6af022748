"""Hostile names and values in every format, read back by a parser that is not ours: nothing acts or breaks out."""

import json
import re
import unicodedata
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from ckptkit.core.findings_text import plain
from ckptkit.core.printable import json_text, printable
from ckptkit.verify.core.report import CheckResult, Finding, Report
from ckptkit.verify.reports import report_text
from ckptkit.verify.reports.render import report_lines

# What each does where it is not escaped, and what must stand in its place on one line.
HOSTILE = {
    "escape": ("a\x1b[2Jb", "a\\x1b[2Jb"),
    "bell": ("a\x07b", "a\\x07b"),
    "right to left": ("a\u202eb", "a\\u202eb"),
    "isolate": ("a\u2066b", "a\\u2066b"),
    "script": ("<script>alert(1)</script>", "<script>alert(1)</script>"),
    "pipe": ("a|b", "a|b"),
    "backtick": ("a`b``c", "a`b``c"),
    "end of CDATA": ("a]]>b", "a]]>b"),
    "NUL": ("a\0b", "a\\x00b"),
    "lone surrogate": ("a\udc80b", "a\\udc80b"),
    "C1": ("a\x9b31mb", "a\\x9b31mb"),
    "newline": ("a\nPASSED", "a\\x0aPASSED"),
    "workflow command": ("::error::a", "\\x3a:error::a"),
    "workflow command behind a line break": ("a\n::error::b", "a\\x0a::error::b"),
    "workflow command that wraps": ("a ::error::b", "a \\x3a:error::b"),
    "older workflow command": ("a##[error]b", "a\\x23#[error]b"),
    "pipeline command": ("##vso[task.complete]", "\\x23#vso[task.complete]"),
}


def report(raw):
    """A report in which everything that files may say is `raw`: a tensor, a file, config values, a path."""
    return Report(
        "0.1.0",
        ("ckptkit", "verify", raw),
        raw,
        raw,
        (CheckResult("CK104", raw, "failed"), CheckResult("CK105", "shapes", "skipped", raw)),
        (
            Finding("CK104", raw, raw, raw, raw, 2, raw, raw),
            Finding("CK105", raw, raw, raw, None, 1, raw, severity="warning"),
        ),
        {raw: [raw]},
        {raw: {raw: {"tensors": 1, "max_error": None, "max_steps": None, "failed": 1, "findings": ["CK104-1"]}}},
        [f"CK104: {raw}"],
        model=raw,
    )


def assert_harmless(text):
    assert not [one for one in text if one != "\n" and unicodedata.category(one) in {"Cc", "Cf", "Cs", "Zl", "Zp"}]
    text.encode()
    for line in text.split("\n"):
        assert not line.lstrip().startswith("::")
        assert "##[" not in line
        assert "##vso[" not in line


def assert_text_is_escaped(raw, shown):
    assert printable(raw) == shown
    for width in (20, 80):
        lines = list(plain(report_lines(report(raw), width, every=True)))
        assert_harmless("\n".join(lines))
        assert lines[-1] == f"FAILED with 1 error and 1 warning  {shown} against {shown}"
        assert sum(line.startswith("PASSED") for line in lines) == 0
    # An inconclusive verdict has a reason in it, which may be the words of a file.
    inconclusive = replace(report(raw), checks=(), findings=(), heat={})
    lines = list(plain(report_lines(inconclusive, 80)))
    assert lines[-1].startswith("INCONCLUSIVE: not looked at: CK104 (")
    for text in ("\n".join(lines), *(report_text(inconclusive, ending) for ending in (".md", ".xml", ".sarif"))):
        assert_harmless(text)


def assert_json_is_escaped(raw, shown):
    text = json_text(report(raw).to_json())
    assert_harmless(text)
    assert text.isascii()
    read = json.loads(text)["findings"][0]["tensor"]
    assert read == raw.replace("\udc80", "\\udc80")
    assert report_text(report(raw), ".json") == text + "\n"


def assert_junit_is_escaped(raw, shown):
    text = report_text(report(raw), ".xml")
    assert_harmless(text)
    root = ElementTree.fromstring(text)  # noqa: S314 - our own text
    assert {element.tag for element in root.iter()} <= {
        *("testsuites", "testsuite", "properties", "property", "testcase", "failure", "skipped", "error", "system-out")
    }
    (failure,) = root.iter("failure")
    assert failure.get("message") == f"{shown} (2 tensors): {shown}"
    assert (failure.text or "").split("\n")[1] == f"  file: {shown}"


def assert_sarif_is_escaped(raw, shown):
    text = report_text(report(raw), ".sarif")
    assert_harmless(text)
    result = json.loads(text)["runs"][0]["results"][0]
    assert result["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == shown
    uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert re.fullmatch(r"[A-Za-z0-9_.~:/%-]+", uri)


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data):
        if self.tags[-1:] not in (["style"], ["script"]):
            self.text.append(data)


def assert_html_is_escaped(raw, shown):
    text = report_text(report(raw), ".html")
    assert_harmless(text)
    page = Page()
    page.feed(text)
    assert page.tags.count("script") == 1
    assert page.text.count(shown) > 5


def assert_markdown_is_escaped(raw, shown):
    text = report_text(report(raw), ".md")
    assert_harmless(text)
    assert sum(line.startswith("# ") for line in text.split("\n")) == 1
    bare = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)  # without code spans, in which nothing is markup
    assert re.search(r"(?<!\\)<(?!/?(?:details|summary)>)", bare) is None
    rows = [line for line in bare.split("\n") if line.startswith("| CK")]
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in rows] == [6, 6]


@pytest.mark.parametrize(("raw", "shown"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_escaped_in_every_format(raw, shown):
    assert_text_is_escaped(raw, shown)
    assert_json_is_escaped(raw, shown)
    assert_junit_is_escaped(raw, shown)
    assert_sarif_is_escaped(raw, shown)
    assert_html_is_escaped(raw, shown)
    assert_markdown_is_escaped(raw, shown)


def test_sarif_names_files_relative_to_the_repository(tmp_path, monkeypatch):
    def location(path):
        content = json.loads(report_text(report(path), ".sarif"))
        (found,) = content["runs"][0]["results"][0]["locations"]
        return found["physicalLocation"]["artifactLocation"]

    inside = tmp_path / "repo" / "jobs"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert location("a b/x.safetensors") == {"uri": f"file://{inside}/a%20b/x.safetensors"}
    (tmp_path / "repo" / ".git").mkdir()
    expected = {"uri": "models/a%20b/x.safetensors", "uriBaseId": "%SRCROOT%"}
    assert location("../models/a b/x.safetensors") == expected
    assert location(f"{tmp_path}/repo/models/a b/x.safetensors") == expected
    assert location("/data/x.safetensors") == {"uri": "file:///data/x.safetensors"}
