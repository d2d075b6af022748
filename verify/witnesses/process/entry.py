"""What a witness does as a program: reads its job, runs it, and writes its report and how it ended."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from verify.witnesses.process.codec import load, save
from verify.witnesses.process.exit_report import PhaseLog


class Job(Protocol):
    """A task in a file. The outcome goes to the file `report`."""

    @property
    def report(self) -> str: ...


J = TypeVar("J", bound=Job)


def run_job(kind: type[J], run: Callable[[J, PhaseLog], Any]) -> None:
    """Runs the job that the command line names, and saves what `run` returns; None: it saved its report itself."""
    job = load(kind, Path(sys.argv[1]))
    report = Path(job.report)
    with PhaseLog(report) as phases:
        if (found := run(job, phases)) is not None:
            save(found, report)
