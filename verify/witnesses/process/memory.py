"""Free memory, and the memory of a witness's processes. Linux only."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

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
    """Whether these processes and all in their sessions use more bytes of memory than `limit` together.

    Memory that holds a file does not count: the kernel reclaims it. Shared memory counts once (PSS), which the kernel
    adds up page by page, so it is read only if the sum of all processes' memory is above the limit.
    """
    members = session_members(processes)
    return _sum(members, "status", "RssAnon", "RssShmem") > limit and (
        _sum(members, "smaps_rollup", "Pss_Anon", "Pss_Shmem") > limit
    )


def session_members(processes: Iterable[subprocess.Popen[bytes]]) -> list[int]:
    """The processes in the sessions that these lead."""
    sessions = {process.pid for process in processes}
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[3]) in sessions:
                members.append(int(path.parent.name))
    return members


def _sum(pids: Iterable[int], file: str, *names: str) -> int:
    """The sum of these entries, in bytes, of a file of /proc of all these processes."""
    entry = re.compile(rf"^(?:{'|'.join(names)}):\s+(\d+) kB$", re.MULTILINE)
    kilobytes = 0
    for pid in pids:
        with suppress(OSError):
            kilobytes += sum(map(int, entry.findall(Path(f"/proc/{pid}/{file}").read_text())))
    return kilobytes << 10
