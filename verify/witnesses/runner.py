"""Runs witnesses: writes their jobs, starts their processes, and reads their reports, or the reasons for missing ones.

A job is a dataclass with a field `report`, the path of the file that its process writes; the folder of that file is
shared by all ranks and empty at first. The job, its report and its exit report travel as JSON (`process.codec`).
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, Generic, TypeVar

from ckptkit.core.printable import one_line
from ckptkit.core.specs import TensorSpec
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.witnesses.process import sandbox
from ckptkit.verify.witnesses.process.codec import load_record, save
from ckptkit.verify.witnesses.process.exit_report import OVER_MEMORY, ExitReport, describe_exit_code, exit_report_of
from ckptkit.verify.witnesses.process.interpreter import Interpreter
from ckptkit.verify.witnesses.process.sandbox import free_memory, start_confined

T = TypeVar("T")
START_S = 1200  # seconds to import a library or an engine on a busy machine, and to compile its kernels
_BYTES_A_SECOND = 20e6  # slower than any usable disk
_LAST_LINES = 8
_HERE = Interpreter()
_MEMORY_SECONDS = 2.0  # between two measurements of memory
_GRACE_SECONDS = 5.0  # between the first rank that failed and the end of those that wait for it
# Messages of gloo, NCCL and torch's store about a lost rank.
_LOST = re.compile(
    r"Connection (?:reset|closed) by peer|Connection closed|Broken pipe|remote process exited|failed to recv"
    r"|sendBytes failed|recvValue failed"
)
_TRACEBACK = "Traceback (most recent call last)"


def time_limit(specs: Mapping[str, TensorSpec], passes: int = 1) -> float:
    """Seconds that a process may take to read these tensors `passes` times."""
    return START_S + passes * sum(spec.nbytes for spec in specs.values()) / _BYTES_A_SECOND


@dataclass(frozen=True)
class Answer(Generic[T]):
    """The reports of a witness's ranks, and the failures of some. A witness of one process has rank 0."""

    reports: Mapping[int, T]  # by rank; a rank may report before it fails
    failures: Mapping[int, ExitReport]  # by rank: those that failed by themselves

    @property
    def report(self) -> T | None:
        return self.reports.get(0)

    @property
    def failing_rank(self) -> int:
        """The first rank with a verdict as failure, or the first that failed. Raises ValueError if none did."""
        return min(self.failures, key=lambda rank: (not self.failures[rank].verdict, rank))

    @property
    def failure(self) -> ExitReport | None:
        return self.failures[self.failing_rank] if self.failures else None

    def require(self, otherwise: str) -> T:
        """The report of the only rank. Raises CannotCheck without one, with the message `otherwise` and the reason."""
        if self.report is None:
            raise inconclusive(otherwise, self.failure)
        return self.report


def inconclusive(what: str, why: object) -> CannotCheck:
    """The exception for a witness that could not run: `what` did not happen, for the reason `why`."""
    return CannotCheck(f"{what}, so this check has no result: {why}")


def ask(job: Any, module: str, kind: type[T], limit_s: float, interpreter: Interpreter = _HERE) -> Answer[T]:
    """Runs `python -m MODULE` with a job in a separate process, which reports a `kind`."""
    return ask_ranks({0: job}, module, kind, limit_s, interpreter)


def ask_ranks(
    jobs: Mapping[int, Any],
    module: str,
    kind: type[T],
    limit_s: float,
    interpreter: Interpreter = _HERE,
    *,
    together: bool = False,
) -> Answer[T]:
    """Runs `python -m MODULE` with a job for each rank, which reports a `kind`; `together` as in `run_ranks`."""
    with TemporaryDirectory(prefix="ckptkit-witness-") as scratch:
        root = Path(scratch)
        reports = {rank: root / f"report-{rank}.json" for rank in jobs}
        for rank, job in jobs.items():
            save(replace(job, report=str(reports[rank])), root / f"job-{rank}.json")
        failed = run_ranks(root, list(jobs), module, limit_s, interpreter, together=together)
        return read_answer(kind, reports, {rank: root / f"log-{rank}" for rank in jobs}, failed)


def read_answer(
    kind: type[T], reports: Mapping[int, Path], logs: Mapping[int, Path], failed: Mapping[int, str]
) -> Answer[T]:
    """The answer of ranks that have ended; `failed`: how those ended that failed first."""
    records = {rank: load_record(kind, path) for rank, path in reports.items() if path.exists()}
    if not failed:
        failed = {rank: "it wrote no report" for rank in reports if rank not in records}
    failures = {rank: exit_report_of(reports[rank]) for rank in failed}
    for rank, failure in failures.items():
        if not failure.message:
            failures[rank] = replace(failure, message=f"{failed[rank]}; {tail_of_log(logs[rank])}")
    causes = failure_messages({rank: failure.message for rank, failure in failures.items()}) or failures
    return Answer(records, {rank: failures[rank] for rank in causes})


def ask_meanwhile(job: Any, module: str, kind: type[T], limit_s: float) -> Future[Answer[T]]:
    """`ask` in a thread; `result` of the future returns its answer or raises its exception."""
    answer = Future[Answer[T]]()

    def wait_for() -> None:
        try:
            answer.set_result(ask(job, module, kind, limit_s))
        except Exception as error:  # noqa: BLE001 - `result` raises it
            answer.set_exception(error)

    # A daemon, so that the end of the run does not wait for it or for its process.
    Thread(target=wait_for, daemon=True).start()
    return answer


def run_ranks(
    root: Path,
    numbers: Sequence[int],
    module: str,
    limit_s: float,
    interpreter: Interpreter = _HERE,
    *,
    together: bool = False,
) -> dict[int, str]:
    """Runs `module` with `root`/job-RANK.json for each number, each in a process that prints into log-RANK.

    `together`: one process without a GPU gets all jobs, forks each rank and writes its exit code into exit-RANK.
    Returns the ends of the ranks that failed first.
    """
    variables = interpreter.environment(root)
    if together or len(numbers) > 1:
        import torch

        variables |= {"OMP_NUM_THREADS": "1"}
        if together or torch.cuda.device_count() < len(numbers):
            variables |= {"CUDA_VISIBLE_DEVICES": ""}
    processes = {}
    for first_rank, *more in [numbers] if together else [[rank] for rank in numbers]:
        jobs, log = [root / f"job-{rank}.json" for rank in (first_rank, *more)], root / f"log-{first_rank}"
        processes[first_rank] = start_confined(module, jobs, log, variables, python=interpreter.path)
    try:
        first, soon_after = wait(numbers, processes, root, time.monotonic() + limit_s)
    finally:
        for process in processes.values():
            sandbox.end(process)
    codes, ends = soon_after | first, dict[int, str]()
    for rank in _blamed(root, first) or _blamed(root, soon_after) or first:
        if (code := codes[rank]) is None:
            ends[rank] = f"it did not end within {limit_s:.0f} s{sandbox.stuck_at(root / f'log-{rank}')}"
        else:
            ends[rank] = str(describe_exit_code(code))
    return ends


def _blamed(root: Path, ranks: Iterable[int]) -> dict[int, str]:
    messages = {rank: exit_report_of(root / f"report-{rank}.json").message for rank in ranks}
    return failure_messages({rank: message or tail_of_log(root / f"log-{rank}") for rank, message in messages.items()})


def failure_messages(messages: Mapping[int, str]) -> dict[int, str]:
    """The messages of ranks that failed by themselves, without ranks that only lost the connection to another one."""
    return {rank: message for rank, message in messages.items() if not _LOST.search(message)}


Codes = dict[int, int | None]


def wait(
    ranks: Sequence[int], processes: Mapping[int, subprocess.Popen[bytes]], scratch: Path, deadline: float
) -> tuple[Codes, Codes]:
    """Exit codes of the ranks that failed first, or None for those running at the deadline; and of all soon after.

    Empty if all went well. A rank that waits for a failing one may end before it. OVER_MEMORY replaces the exit code of
    ranks that together exceeded their memory. At the deadline the stacks of all threads are written into the logs.
    """
    limit, next_measurement = sandbox.memory_limit(free_memory()), time.monotonic()
    while True:
        codes = _codes(ranks, processes, scratch)
        running = [rank for rank, code in codes.items() if code is None]
        if failed := _failed(codes):
            time.sleep(_GRACE_SECONDS if len(ranks) > 1 else 0)
            return failed, _failed(_codes(ranks, processes, scratch))
        if not running:
            return {}, {}
        if limit and time.monotonic() >= next_measurement:
            if sandbox.exceeds_memory(limit, processes.values()):
                return dict.fromkeys(running, OVER_MEMORY), {}
            next_measurement = time.monotonic() + _MEMORY_SECONDS
        if time.monotonic() > deadline:
            sandbox.ask_for_stacks(processes.values())
            return dict.fromkeys(running), {}
        time.sleep(0.1)


def _failed(codes: Codes) -> Codes:
    return {rank: code for rank, code in codes.items() if code}


def _codes(ranks: Sequence[int], processes: Mapping[int, subprocess.Popen[bytes]], scratch: Path) -> Codes:
    """Exit codes of ranks, from their parent's files or from their processes, or None while they run."""
    files = {rank: scratch / f"exit-{rank}" for rank in ranks}
    ended = {rank: process.poll() for rank, process in processes.items()}
    return {rank: int(file.read_text()) if file.exists() else ended.get(rank) for rank, file in files.items()}


def tail_of_log(log: Path) -> str:
    """The last exception in a log with its place, or the last lines. An engine's own log lines begin with `[`."""
    text = log.read_text(errors="replace") if log.exists() else ""  # missing for a rank that was not forked yet
    lines = [line for line in text.splitlines() if line.strip()]
    starts = [index for index, line in enumerate(lines) if _TRACEBACK in line]
    if not starts:
        return f"it last printed: {one_line(' | '.join(lines[-_LAST_LINES:]))}" if lines else "it printed nothing"
    after = list(takewhile(lambda line: not line.startswith("["), lines[starts[-1] + 1 :]))
    frames = [line.strip() for line in after if line.startswith("  File ")]
    message = [line for line in after if not line.startswith(" ")]
    return one_line(" | ".join([*message[:_LAST_LINES], *(f"at {frame}" for frame in frames[-1:])]))
