"""Runs the command of a report on its case, as the shell does, in this process."""

import json
import shlex
import shutil
from contextlib import chdir
from dataclasses import dataclass
from typing import Any

from click.testing import CliRunner

from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError
from reports.report import SOURCE


@dataclass(frozen=True)
class Said:
    """What a command printed: its exit code, its report as JSON (None where it ended with an error), and the rest."""

    code: int
    report: dict[str, Any] | None
    errors: str

    @property
    def findings(self):
        return list(self.report["findings"]) if self.report else []

    @property
    def text(self):
        return json.dumps(self.report) + self.errors


def make(case, starts, work):
    work.mkdir()
    if case.start:
        model, _, kind = case.start.partition("/")
        if kind:
            shutil.copytree(starts.path(case.start), work / "CKPT")
        (work / SOURCE).symlink_to(starts.path(f"{model}/hf"))
    if case.prepare is not None:
        case.prepare(work)
    return work


def run(command, work):
    program, *words = shlex.split(command)
    assert program == "ckptkit"
    at = words.index("--") if "--" in words else len(words)
    with chdir(work):
        done = CliRunner().invoke(cli, [*words[:at], "--json", *words[at:]])
    if isinstance(done.exception, CkptkitError):  # the command itself prints it and ends with 2
        return Said(2, None, str(done.exception))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Said(done.exit_code, json.loads(done.stdout) if done.exit_code < 2 or done.stdout else None, done.stderr)


def missed(report, said):
    """Why what was said does not find the report; None where it does."""
    words = [_words(finding) for finding in said.findings if _code(finding) == report.code]
    if not words:
        return f"exit {said.code}, no finding of {report.code}; {list(_all(said)) or said.errors[-500:]}"
    if not any(all(name in text for name in report.case.names) for text in words):
        return f"no finding of {report.code} names {report.case.names}: {words}"
    return None if said.code == 1 else f"exit {said.code}: only a warning"


def _all(said):
    yield from (f"{_code(finding)}: {_words(finding)}" for finding in said.findings)
    for check in (said.report or {}).get("checks", []):
        if check["status"] == "skipped" and check["reason"]:
            yield f"{check['code']} skipped: {check['reason']}"


def _code(finding):
    return str(finding.get("code") or f"lint: {finding['kind']}")


def _words(finding):
    return " ".join(str(value) for value in finding.values())
