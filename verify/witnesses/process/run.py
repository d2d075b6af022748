"""Runs witnesses as child processes, waits for them, and says how those ended that failed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from ckptkit.core.printable import one_line
from ckptkit.core.specs import TensorSpec
from verify.witnesses.process.codec import load, save
from verify.witnesses.process.exit_report import exit_report_of, how_it_ended
from verify.witnesses.process.interpreter import Interpreter
from verify.witnesses.process.ranks import wait
from verify.witnesses.process.sandbox import end, start, stuck_at

T = TypeVar("T")
_BYTES_A_SECOND = 20e6  # slower than any disk worth waiting for
_LAST_LINES = 8
_HERE = Interpreter()
_TRACEBACK = "Traceback (most recent call last)"


def time_limit(start_s: float, specs: Mapping[str, TensorSpec], passes: int = 1) -> float:
    """How many seconds a process may take that starts in `start_s` and reads these tensors `passes` times."""
    return start_s + passes * sum(spec.nbytes for spec in specs.values()) / _BYTES_A_SECOND


def ask(job: Any, module: str, kind: type[T], limit_s: float, interpreter: Interpreter = _HERE) -> tuple[T | None, str]:
    """Runs `python -m MODULE` with a job (an `entry.Job`) in a process of its own.

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
        return load(kind, report) if report.exists() else None, message


def run_ranks(root: Path, ranks: int, module: str, limit_s: float, interpreter: Interpreter = _HERE) -> dict[int, str]:
    """Runs `module` with `root`/job-RANK.json, a process each, which print into log-RANK.

    Returns how those ended that failed first.
    """
    variables = interpreter.environment(root)
    if ranks > 1:
        import torch

        variables |= {"OMP_NUM_THREADS": "1"}
        if torch.cuda.device_count() < ranks:
            variables |= {"CUDA_VISIBLE_DEVICES": ""}
    processes = {
        rank: start(module, [root / f"job-{rank}.json"], root / f"log-{rank}", variables, python=interpreter.path)
        for rank in range(ranks)
    }
    try:
        first, _ = wait(range(ranks), processes, root, time.monotonic() + limit_s)
    finally:
        for process in processes.values():
            end(process)
    late = f"it did not end within {limit_s:.0f} s"
    return {
        rank: late + stuck_at(root / f"log-{rank}") if code is None else str(how_it_ended(code))
        for rank, code in first.items()
    }


def last_words(log: Path) -> str:
    """The last exception in a log with the place it came from, or the last lines where there is none; on one line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
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
