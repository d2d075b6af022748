"""Starts a witness that cannot outlive its parent, run a checkpoint's code, read secrets, use the network, or hang.

As a program, `python -m ckptkit.verify.witnesses.process.sandbox PARENT MODULE WORDS...`, it prepares its own process
and then runs MODULE as `python -m` would. It also measures the memory of witnesses. Linux only, as the witnesses are.
"""

from __future__ import annotations

import faulthandler
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ckptkit.core.isolation import end_with_parent, offline, start_python
from ckptkit.core.printable import one_line

DUMP = signal.SIGUSR1  # asks a witness for the Python stacks of its threads
_DUMP_S = 1.0
_FRAMES = 3


def environment(**more: str) -> dict[str, str]:
    """This process's variables without secrets, with `more`: offline, on the loopback interface, and without TF32."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    # Some containers turn on TF32, which rounds the factors of float32 to 10 bits of mantissa.
    exact = {"NVIDIA_TF32_OVERRIDE": "0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"}
    return offline() | loopback | exact | more


def start_confined(
    module: str, words: Sequence[object], log: Path, variables: Mapping[str, str], *, python: str = sys.executable
) -> subprocess.Popen[bytes]:
    """Starts `python -m MODULE WORDS...` in the directory of `log`, into which it prints, and in a new session."""
    command = ["-m", __name__, str(os.getpid()), module, *map(str, words)]
    with log.open("wb") as output:
        pipes = {"stdout": output, "stderr": output}
        return start_python(command, log.parent, variables, python, start_new_session=True, **pipes)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and those that it started, which may outlive it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ask_for_stacks(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Has every Python process in these sessions write the stacks of its threads into its log."""
    for pid in session_members(processes):
        with suppress(OSError):
            caught = re.search(r"^SigCgt:\s+(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
            if caught and int(caught[1], 16) >> (DUMP - 1) & 1:  # it would kill a compiler
                os.kill(pid, DUMP)
    time.sleep(_DUMP_S)


def stuck_at(log: Path) -> str:
    """The innermost frames of the thread that answered `ask_for_stacks`, or an empty text if none did."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    starts = [index for index, line in enumerate(lines) if line.startswith("Current thread ")]
    if not starts:
        return ""
    frames = [line.strip() for line in lines[starts[-1] + 1 :][:_FRAMES] if line.startswith("  File ")]
    return f"; it was at {one_line(' | '.join(frames))}"


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    faulthandler.register(DUMP, file=2, all_threads=True)
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


_MEMORY = Path("/proc/meminfo")
_PART = 0.95  # of the memory that is free at the start, for all processes of a witness together


def free_memory() -> int:
    """Bytes that processes may still allocate, or 0 if Linux does not report it."""
    if not _MEMORY.exists():
        return 0
    free = re.search(r"^MemAvailable:\s+(\d+) kB$", _MEMORY.read_text(), re.MULTILINE)
    return int(free[1]) << 10 if free else 0


def memory_limit(free: int) -> int:
    """Bytes that the processes of a witness may use together, of `free` ones; 0 if no limit is known."""
    return int(_PART * free)


def exceeds_memory(limit: int, processes: Iterable[subprocess.Popen[bytes]]) -> bool:
    """Whether these processes and all in their sessions use more bytes of memory than `limit` together."""
    members = session_members(processes)
    # Memory that holds a file does not count: the kernel reclaims it. Shared memory counts once (PSS), which the kernel
    # adds up page by page, so it is read only if the sum of all processes' memory is above the limit.
    return _sum(members, "status", "RssAnon", "RssShmem") > limit and (
        _sum(members, "smaps_rollup", "Pss_Anon", "Pss_Shmem") > limit
    )


def session_members(processes: Iterable[subprocess.Popen[bytes]]) -> list[int]:
    sessions = {process.pid for process in processes}
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[3]) in sessions:
                members.append(int(path.parent.name))
    return members


def _sum(pids: Iterable[int], file: str, *names: str) -> int:
    entry = re.compile(rf"^(?:{'|'.join(names)}):\s+(\d+) kB$", re.MULTILINE)
    kilobytes = 0
    for pid in pids:
        with suppress(OSError):
            kilobytes += sum(map(int, entry.findall(Path(f"/proc/{pid}/{file}").read_text())))
    return kilobytes << 10


if __name__ == "__main__":
    main()
