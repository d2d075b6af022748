"""Asks tokenizers and transformers in this process, as `ckptkit.verify.evidence.side` does in one of its own."""

from pathlib import Path
from typing import Any

import pytest

from ckptkit.verify.evidence.side import processors, templates, texts
from ckptkit.verify.witnesses.process.exit_report import PhaseLog, exit_report_of
from ckptkit.verify.witnesses.runner import Answer


def ask_here(monkeypatch: pytest.MonkeyPatch, scratch: Path) -> list[Any]:
    """Saves the seconds that a process takes to import transformers. Returns the jobs that are asked."""
    jobs: list[Any] = []

    def ask(job: Any, module: str, *_: Any) -> Answer[Any]:
        jobs.append(job)
        report = scratch / "report.json"
        run: Any = {one.__name__: one for one in (texts, processors, templates)}[module].run
        try:
            with PhaseLog(report) as phases:
                return Answer({0: run(job, phases)}, {})
        except Exception:  # noqa: BLE001 - a process would end with it
            return Answer({}, {0: exit_report_of(report)})

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for one in (texts, processors, templates):
        monkeypatch.setattr(one, "ask", ask)
    return jobs
