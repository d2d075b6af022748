"""How much memory is free, and how much the processes of a witness take together. Linux only."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_PART = 0.95  # of the memory that is free at the start, for all processes of a witness together


def free_memory() -> int:
    """Bytes that processes may still take, as Linux says; without that, none."""
    if not _MEMORY.exists():
        return 0
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _MEMORY.read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def memory_limit(free: int) -> int:
    """Bytes that the processes of a witness may take together, of `free` ones; 0: no limit is known."""
    return int(_PART * free)


def exceeds_memory(limit: int, processes: Iterable[subprocess.Popen[bytes]]) -> bool:
    """Whether these processes and all in their sessions have more bytes of memory than `limit` together.

    Memory that holds a file counts not: the kernel takes it back. What several share counts once (PSS), which the
    kernel adds up page by page, so it is asked only where the sum of what each has is above the limit.
    """
    members = session_members(processes)
    return _sum(members, "status", "RssAnon", "RssShmem") > limit and (
        _sum(members, "smaps_rollup", "Pss_Anon", "Pss_Shmem") > limit
    )


def session_members(processes: Iterable[subprocess.Popen[bytes]]) -> list[int]:
    """The processes of the sessions that these lead."""
    sessions = {process.pid for process in processes}
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[3]) in sessions:
                found.append(int(path.parent.name))
    return found


def _sum(pids: Iterable[int], file: str, *names: str) -> int:
    """The bytes that files of /proc say under these names, of all these processes."""
    found = 0
    for pid in pids:
        with suppress(OSError):
            text = Path(f"/proc/{pid}/{file}").read_text()
            found += sum(
                int(size) << 10 for size in re.findall(rf"^(?:{'|'.join(names)}):\s+(\d+) kB$", text, re.MULTILINE)
            )
    return found
