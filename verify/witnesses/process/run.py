"""Runs witnesses as child processes, one or several ranks, waits for them, and says how those ended that failed."""

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
from typing import Any, TypeVar

from ckptkit.core.printable import one_line
from ckptkit.core.specs import TensorSpec
from verify.witnesses.process.codec import load_record, save
from verify.witnesses.process.exit_report import OVER_MEMORY, ExitReport, exit_report_of, how_it_ended
from verify.witnesses.process.interpreter import Interpreter
from verify.witnesses.process.memory import free_memory, memory_limit, takes_more_than
from verify.witnesses.process.sandbox import ask_for_stacks, end, start_confined, stuck_at

T = TypeVar("T")
_BYTES_A_SECOND = 20e6  # slower than any disk worth waiting for
_LAST_LINES = 8
_HERE = Interpreter()
_MEMORY_SECONDS = 2.0  # between two looks at how much memory they take
_GRACE_SECONDS = 5.0  # between the first rank that failed and the end of those that wait for it
# What gloo, NCCL and torch's store say of a rank that is gone.
_LOST = re.compile(
    r"Connection (?:reset|closed) by peer|Connection closed|Broken pipe|remote process exited|failed to recv"
    r"|sendBytes failed|recvValue failed"
)
_TRACEBACK = "Traceback (most recent call last)"


def time_limit(start_s: float, specs: Mapping[str, TensorSpec], passes: int = 1) -> float:
    """How many seconds a process may take that starts in `start_s` and reads these tensors `passes` times."""
    return start_s + passes * sum(spec.nbytes for spec in specs.values()) / _BYTES_A_SECOND


def ask(job: Any, module: str, kind: type[T], limit_s: float, interpreter: Interpreter = _HERE) -> tuple[T | None, str]:
    """Runs `python -m MODULE` with a job, which has a `report`, in a process of its own.

    Returns its report, None without one; and in which phase it ended and what it said, empty where it ended well.
    """
    with TemporaryDirectory(prefix="ckptkit-witness-") as scratch:
        root = Path(scratch)
        report = root / "report-0.json"
        save(replace(job, report=str(report)), root / "job-0.json")
        failed = run_ranks(root, 1, module, limit_s, interpreter)
        message = ""
        if failed:
            ending = exit_report_of(report)
            message = f"while {ending.phase}: {ending.message or last_error(root / 'log-0') or failed[0]}"
        return load_record(kind, report) if report.exists() else None, message


def ask_meanwhile(job: Any, module: str, kind: type[T], limit_s: float) -> Future[tuple[T | None, str]]:
    """As `ask`, whose answer or exception `result` gives once it is there."""
    answer = Future[tuple[T | None, str]]()

    def wait_for() -> None:
        try:
            answer.set_result(ask(job, module, kind, limit_s))
        except Exception as error:  # noqa: BLE001 - `result` raises it
            answer.set_exception(error)

    # A daemon, so that nothing waits for it, or for its process, when something else ends the run.
    Thread(target=wait_for, daemon=True).start()
    return answer


@dataclass(frozen=True)
class Failure:
    """Why a rank gave no report: in words, and how they are to be read."""

    message: str
    ending: ExitReport

    def __str__(self) -> str:
        return f"while {self.ending.phase}, which says nothing about the checkpoint: {self.message}"


def failures_of(failed: Mapping[int, str], reports: Mapping[int, Path], logs: Mapping[int, Path]) -> dict[int, Failure]:
    """Why ranks gave no report; `failed`: how those ended that are to blame. Else what all ranks say."""
    found = {}
    for rank in failed or reports:
        ending = exit_report_of(reports[rank])
        words = f"{failed.get(rank, 'no report')}; {ending.message or last_words(logs[rank])}"
        found[rank] = Failure(words, ending)
    return {rank: found[rank] for rank in failure_messages({rank: one.message for rank, one in found.items()})} or found


def run_ranks(
    root: Path,
    ranks: int | Sequence[int],
    module: str,
    limit_s: float,
    interpreter: Interpreter = _HERE,
    *,
    together: bool = False,
) -> dict[int, str]:
    """Runs `module` with `root`/job-RANK.json, a process each, which print into log-RANK. `ranks`: so many, or these.

    `together`: one process without a GPU is given all jobs, forks each rank and writes its exit code into exit-RANK.
    Returns how those ended that failed first.
    """
    numbers = list(range(ranks)) if isinstance(ranks, int) else list(ranks)
    variables = interpreter.environment(root)
    if together or len(numbers) > 1:
        import torch

        variables |= {"OMP_NUM_THREADS": "1"}
        if together or torch.cuda.device_count() < len(numbers):
            variables |= {"CUDA_VISIBLE_DEVICES": ""}
    processes = {
        several[0]: start_confined(
            module,
            [root / f"job-{rank}.json" for rank in several],
            root / f"log-{several[0]}",
            variables,
            python=interpreter.path,
        )
        for several in ([numbers] if together else [[rank] for rank in numbers])
    }
    try:
        first, soon_after = wait(numbers, processes, root, time.monotonic() + limit_s)
    finally:
        for process in processes.values():
            end(process)
    late, codes = f"it did not end within {limit_s:.0f} s", soon_after | first
    return {
        rank: late + stuck_at(root / f"log-{rank}") if codes[rank] is None else str(how_it_ended(codes[rank] or 0))
        for rank in _blamed(root, first) or _blamed(root, soon_after) or first
    }


def _blamed(root: Path, ranks: Iterable[int]) -> dict[int, str]:
    """Those of some ranks that failed by themselves, with what they said."""
    messages = {rank: exit_report_of(root / f"report-{rank}.json").message for rank in ranks}
    return failure_messages({rank: message or last_words(root / f"log-{rank}") for rank, message in messages.items()})


def failure_messages(messages: Mapping[int, str]) -> dict[int, str]:
    """The messages of ranks that failed by themselves: those that only lost another one are left out."""
    return {rank: message for rank, message in messages.items() if not _LOST.search(message)}


Codes = dict[int, int | None]


def wait(
    ranks: Sequence[int], processes: Mapping[int, subprocess.Popen[bytes]], scratch: Path, deadline: float
) -> tuple[Codes, Codes]:
    """Exit codes of the ranks that failed first, None for those running at the deadline; and all that had soon after.

    Empty when all went well. Whoever waits for a rank that fails may be seen to fail before it. OVER_MEMORY stands for
    ranks that were running when they took more memory together than they may. At the deadline their logs get the
    stacks of their threads.
    """
    most, look_at = memory_limit(free_memory()), time.monotonic()
    while True:
        codes = _codes(ranks, processes, scratch)
        if failed := _failed(codes):
            time.sleep(_GRACE_SECONDS if len(ranks) > 1 else 0)
            return failed, _failed(_codes(ranks, processes, scratch))
        if all(code == 0 for code in codes.values()):
            return {}, {}
        if most and time.monotonic() >= look_at:
            if takes_more_than(most, processes.values()):
                return {rank: OVER_MEMORY for rank, code in codes.items() if code is None}, {}
            look_at = time.monotonic() + _MEMORY_SECONDS
        if time.monotonic() > deadline:
            ask_for_stacks(processes.values())
            return {rank: None for rank, code in codes.items() if code is None}, {}
        time.sleep(0.1)


def _failed(codes: Codes) -> Codes:
    return {rank: code for rank, code in codes.items() if code}


def _codes(ranks: Sequence[int], processes: Mapping[int, subprocess.Popen[bytes]], scratch: Path) -> Codes:
    """Exit codes of ranks: as their parent wrote them down, or of their own processes; None while they run."""
    files = {rank: scratch / f"exit-{rank}" for rank in ranks}
    ended = {rank: process.poll() for rank, process in processes.items()}
    return {rank: int(file.read_text()) if file.exists() else ended.get(rank) for rank, file in files.items()}


def last_words(log: Path) -> str:
    """The last exception in a log with the place it came from, or the last lines where there is none; on one line."""
    text = log.read_text(errors="replace") if log.exists() else ""  # a rank that was not forked yet has none
    lines = [line for line in text.splitlines() if line.strip()]
    starts = [index for index, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if not starts:
        return f"it last printed: {one_line(' | '.join(lines[-_LAST_LINES:]))}" if lines else "it printed nothing"
    return _exception(lines[starts[-1] :], _LAST_LINES)


def last_error(log: Path) -> str | None:
    """The last exception in an engine's log, which goes on after it, with the place that raised it."""
    lines = log.read_text(errors="replace").splitlines()
    starts = [index for index, line in enumerate(lines) if _TRACEBACK in line]
    if not starts:
        return None
    after = takewhile(lambda line: not line.startswith("["), lines[starts[-1] + 1 :])
    return _exception([lines[starts[-1]], *after], 2)


def _exception(lines: list[str], limit: int) -> str:
    """What a traceback says, in at most `limit` lines of its message, and the last place that it names."""
    frames = [line.strip() for line in lines if line.startswith("  File ")]
    message = [line for line in lines[1:] if line.strip() and not line.startswith(" ")]
    return one_line(" | ".join([*message[:limit], *(f"at {frame}" for frame in frames[-1:])]))
