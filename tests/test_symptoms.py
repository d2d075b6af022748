"""docs/symptoms.md: every row names a command, checks and tests that exist, and its tests know its checks."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from mutations import MUTATIONS

from ckptkit import hooks
from ckptkit.app.cli import _MODULES, cli
from verify.check import all_checks

ROOT = Path(__file__).resolve().parent.parent
_ROW = re.compile(
    r"### S(?P<number>\d+)\. (?P<symptom>.+?)\n- Causes: (?P<causes>.+?)\n- Command: `(?P<command>.+?)`\n"
    r"(?:- In the job: (?P<job>.+?)\n)?"
    r"- Checks: (?P<checks>.+?)\n- Test: (?P<tests>.+?)(?=\n\n)",
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


def test_every_row_is_read() -> None:
    assert [row.number for row in ROWS] == list(range(1, TEXT.count("### S") + 1))
    assert len(ROWS) > 30


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"S{row.number}")
def test_row_names_a_command_with_options_that_exist(row: Row) -> None:
    program, verb, *words = row.command
    assert program == "ckptkit"
    assert verb in _MODULES
    command = cli.get_command(cli.make_context("ckptkit", ["--help"], resilient_parsing=True), verb)
    assert command is not None
    known = {name for option in command.params for name in option.opts}
    assert {word for word in words[: words.index("--") if "--" in words else None] if word.startswith("--")} <= known


def test_rows_name_hooks_that_exist() -> None:
    named = [name for row in _ROW.finditer(TEXT) for name in re.findall(r"`ckptkit\.hooks\.(\w+)`", row["job"] or "")]
    assert len(named) >= 3
    assert all(callable(getattr(hooks, name)) for name in named)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"S{row.number}")
def test_row_names_checks_and_tests_that_show_them(row: Row) -> None:
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
