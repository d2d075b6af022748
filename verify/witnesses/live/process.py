"""A live engine as a witness: `python -m ckptkit.verify.witnesses.live.process JOB.json` serves it and reports.

The engine answers the prompts. Then the checkpoint is pushed into it again through the requests of trainers, and its
tensors are read back and compared with the first load, also by the engine's own checker if it has one. Parameters are
poisoned before the first update of a kind, which reveals tensors without an update.

Engines are imported only inside functions. No exception of an engine is a verdict: the report is then inconclusive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch

from ckptkit.core.errors import words_of
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.verify.witnesses.live.job import AGAIN, DRAFT, FIRST, RESUMED, EngineJob, EngineReport, Reload
from ckptkit.verify.witnesses.live.server import Held, LiveAdapter, NotTried, RefusedByEngine, Server
from ckptkit.verify.witnesses.process.codec import save
from ckptkit.verify.witnesses.process.exit_report import ExitReport, Phase, run_job


def run(job: EngineJob, phases: ExitReport) -> None:
    """Starts the engine and runs the job; saves the report after each step. Raises the engine's exceptions."""
    phases.enter(Phase("starting the engine"))
    adapter: LiveAdapter = import_module(job.adapter)
    server = adapter.serve(job, HfCheckpoint(job.checkpoint))
    try:
        for report in _reports(job, server, phases, adapter.version()):
            save(report, Path(job.report))
    finally:
        server.stop()


def _reports(job: EngineJob, server: Server, phases: ExitReport, version: str) -> Iterator[EngineReport]:
    """The report after the first answers and after each step; the last one is complete."""
    phases.enter(Phase("reading back the engine's weights"))
    first = server.held() if job.reloads else {}
    phases.enter(Phase("answering prompts"))
    passes = {FIRST: server.answers(), AGAIN: server.answers()}
    volatile = _changed(first, server.held()) if first else []
    report = EngineReport(
        version,
        torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU",
        passes,
        len(first),
        sum(size for _, size in first.values()),
        volatile,
        draft_held=sum(name.partition(" ")[2].startswith(DRAFT) for name in first),
    )
    yield report
    refused = False
    for name, step in _steps(job):
        if refused and name != RESUMED:
            continue
        phases.enter(Phase(name))
        reload = _reload(name, step, server, first, volatile)
        if not reload.refused:
            passes = {**passes, name: server.answers()}
        report = replace(report, passes=passes, reloads=[*report.reloads, reload])
        yield report
        refused = bool(reload.refused)
        if reload.refused and reload.tried:
            break  # its weights are now undefined
    yield replace(report, complete=True)


def _steps(job: EngineJob) -> Iterator[tuple[str, Sequence[str]]]:
    """Names of steps, and the methods of Server that each consists of. Resuming is last, since it loses tensors."""
    if job.update:
        yield "updating by tensor over poison", ("snapshot_and_poison", "update_by_tensor")
        yield "updating by tensor again", ("update_by_tensor",)
        yield "updating from disk over poison", ("snapshot_and_poison", "update_from_disk")
        yield "updating from disk again", ("update_from_disk",)
    if job.release_resume:
        yield RESUMED, ("release_and_resume", "update_by_tensor")


def _reload(name: str, step: Sequence[str], server: Server, first: Held, volatile: Sequence[str]) -> Reload:
    """Runs a step and compares. A refused reload leaves nothing to compare."""
    try:
        for method in step:
            getattr(server, method)()
    except RefusedByEngine as refusal:
        return Reload(name, refused=words_of(refusal), tried=not isinstance(refusal, NotTried))
    unequal = server.check("compare") if step[0] == "snapshot_and_poison" else []
    return Reload(name, "", [one for one in _changed(first, server.held()) if one not in volatile], unequal)


def _changed(before: Held, after: Held) -> list[str]:
    """Names that are not in both mappings with the same digest."""
    return sorted({name for name, _ in before.items() ^ after.items()})


if __name__ == "__main__":
    run_job(EngineJob, run)
