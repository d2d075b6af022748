"""The processes of a witness that runs as several ranks: waiting for them, ending them, and who failed first."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from verify.witnesses.process.exit_report import OVER_MEMORY
from verify.witnesses.process.memory import free_memory, memory_limit, takes_more_than
from verify.witnesses.process.sandbox import ask_for_stacks

_MEMORY_SECONDS = 2.0  # between two looks at how much memory they take
_GRACE_SECONDS = 5.0  # between the first rank that failed and the end of those that wait for it
# What gloo, NCCL and torch's store say of a rank that is gone.
_LOST = re.compile(
    r"Connection (?:reset|closed) by peer|Connection closed|Broken pipe|remote process exited|failed to recv"
    r"|sendBytes failed|recvValue failed"
)


def causes(messages: Mapping[int, str]) -> dict[int, str]:
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
    ended = {rank: process.poll() for rank, process in processes.items()}
    return {rank: _code(scratch / f"exit-{rank}", ended.get(rank)) for rank in ranks}


def _code(file: Path, ended: int | None) -> int | None:
    """Exit code of a rank: as its parent wrote it down, or that of its own process; None while it runs."""
    return int(file.read_text()) if file.exists() else ended
