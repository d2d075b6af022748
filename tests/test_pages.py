"""The documentation: the site builds strictly, and commands, checks and tests that pages name exist."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass

import pytest
from mutations import MUTATIONS
from support.page_blocks import BLOCKS, ROOT

from ckptkit.app.cli import cli
from ckptkit.app.cli.verb import VERBS
from ckptkit.verify.core.check import all_checks
from docs.examples.symptoms import page

_COMMAND = re.compile(r"^(?:\$ )?(ckptkit \w+ .*|ckptkit \w+)$", re.M)


def test_site_builds_with_every_link_and_anchor_right(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    checks = (tmp_path / "checks.html").read_text()
    assert re.search(r'<a href="checks/CK505.html">CK505</a> every router', checks)
    assert re.search(r"<h1 .*CK505: every router", (tmp_path / "checks/CK505.html").read_text())
    assert {page.stem for page in (tmp_path / "checks").glob("*.html")} == {check.code for check in all_checks()}
    line = (tmp_path / "reference-cli.html").read_text()
    assert "--against-megatron" in line
    assert "Sentinel" not in line
    assert 'id="ckptkit.app.api.convert"' in (tmp_path / "reference-python.html").read_text()
    assert not re.search(r"<(?:script|link)[^>]+(?:src|href)=.https?:", checks), "nothing is fetched from elsewhere"
    assert 'id="s17"' in (tmp_path / "symptoms.html").read_text()


def options_of(verb):
    command = cli.get_command(cli.make_context("ckptkit", ["--help"], resilient_parsing=True), verb)
    return {name for option in command.params for name in option.opts} if command else set()


def test_commands_of_all_pages_have_verbs_and_options_that_exist():
    wrong, count = [], 0
    for block in BLOCKS:
        for line in _COMMAND.findall(block.text.replace("\\\n", " ")):
            words = shlex.split(line, comments=True)
            verb, rest = words[1], words[2 : words.index("--") if "--" in words else None]
            count += 1
            given = {word.strip(",;").partition("=")[0] for word in rest if word.startswith("--")}
            if verb not in VERBS or not given <= options_of(verb):
                wrong.append(f"{block.page}: {line}")
    assert wrong == []
    assert count > 40


# docs/symptoms.md: every row names a command, checks and tests, and its tests know its checks.
_ROW = re.compile(
    r"### S(?P<number>\d+)\. (?P<symptom>.+?)\n- Causes: (?P<causes>.+?)\n- Command: `(?P<command>.+?)`\n"
    r"(?:- In the job: (?P<job>.+?)\n)?(?:- In a log: .+?\n)?"
    r"- Checks: (?P<checks>.+?)\n- Test:\s+(?P<tests>.+?)(?=\n\n)",
    re.DOTALL,
)
TEXT = (ROOT / "docs/symptoms.md").read_text()


@dataclass(frozen=True)
class Row:
    number: int
    command: list[str]
    codes: list[str]
    tests: list[tuple[str, str]]  # file and function


ROWS = [
    Row(
        int(row["number"]),
        row["command"].split(),
        re.findall(r"CK\d{3}", row["checks"]),
        re.findall(r"`(\S+?)::(\w+)`", row["tests"]),
    )
    for row in _ROW.finditer(TEXT)
]
# What is not a defect of a checkpoint has no check.
WITHOUT_CHECK = {"convert"}


def test_page_of_symptoms_is_made_of_their_table():
    assert page() == TEXT, "make symptoms"


def test_every_row_is_read():
    assert [row.number for row in ROWS] == list(range(1, TEXT.count("### S") + 1))
    assert len(ROWS) > 30


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"S{row.number}")
def test_row_names_a_command_with_options_that_exist(row):
    program, verb, *words = row.command
    assert program == "ckptkit"
    assert verb in VERBS
    given = words[: words.index("--") if "--" in words else None]
    assert {word for word in given if word.startswith("--")} <= options_of(verb)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"S{row.number}")
def test_row_names_checks_and_tests_that_show_them(row):
    assert set(row.codes) <= {check.code for check in all_checks()}
    assert row.codes or row.command[1] in WITHOUT_CHECK
    assert row.tests
    texts = {file: (ROOT / file).read_text() for file, _ in row.tests}
    for file, function in row.tests:
        defined = {node.name for node in ast.parse(texts[file]).body if isinstance(node, ast.FunctionDef)}
        assert function in defined, f"{file}::{function}"
    mutated = {mutation.code for mutation in MUTATIONS if any(file.startswith("tests/mutations/") for file in texts)}
    for code in row.codes:
        assert code in mutated or any(code in text for text in texts.values()), code
