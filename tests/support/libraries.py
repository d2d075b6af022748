"""Asks tokenizers and transformers in this process, as `verify.evidence.side.texts` does in one of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verify.evidence.side.texts import Answer, TextJob, run
from verify.witnesses.process.exit_report import PhaseLog, exit_report_of


def ask_here(monkeypatch: pytest.MonkeyPatch, scratch: Path) -> list[TextJob]:
    """Saves the seconds that a process takes to import transformers. Returns the jobs that are asked."""
    jobs: list[TextJob] = []

    def ask(job: TextJob, *_: Any) -> tuple[Answer | None, str]:
        jobs.append(job)
        report = scratch / "report.json"
        try:
            with PhaseLog(report) as phases:
                return run(job, phases), ""
        except Exception as error:  # noqa: BLE001 - a process would end with it
            ending = exit_report_of(report)
            return None, f"while {ending.phase}: {ending.message or error}"

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("verify.evidence.side.texts.ask", ask)
    return jobs
