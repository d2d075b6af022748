"""Measures seconds and peak memory of a process, and puts files into the page cache or out of it."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SMALLEST = "BENCH_SMALLEST" in os.environ  # each section once, on the smallest model: whether it runs, not how fast
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "1" if SMALLEST else "3"))
_EVERY_S = 0.005


@dataclass(frozen=True)
class Run:
    """A command that ended well. In bytes: `resident` is the kernel's ru_maxrss, `anonymous` the most RssAnon seen.

    `settled`: seconds until what it wrote was on the disk, too, which it need not be when the command ends. `busy`:
    user and system seconds of its processors, which other work on the machine changes less.
    """

    seconds: float
    settled: float
    busy: float
    resident: int
    anonymous: int


def chosen(variable: str, usual: Sequence[str], smallest: Sequence[str]) -> list[str]:
    """The models or sizes to measure: those that the environment variable names, or else the section's own."""
    return os.environ.get(variable, " ".join(smallest if SMALLEST else usual)).split()


def run(command: Sequence[str], product: Path | None = None) -> Run:
    """Runs a command, whose product is removed before; the disk is synced first. Raises SystemExit when it fails."""
    if product is not None:
        shutil.rmtree(product, ignore_errors=True)
    _sync()
    began, anonymous = time.monotonic(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    ended, status, usage = os.wait4(process.pid, os.WNOHANG)
    while not ended:
        anonymous = max(anonymous, _anonymous(process.pid))
        time.sleep(_EVERY_S)
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
    seconds = time.monotonic() - began
    _sync()
    settled = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return Run(seconds, settled, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, anonymous)


def _sync() -> None:
    if not SMALLEST:  # it waits for everything that is written on this machine
        os.sync()


# What is run, the directory that it reads, and the one that it writes.
Command = tuple[list[str], Path, Path | None]


def cold_runs(commands: Mapping[str, Command], kept: Collection[Path]) -> dict[str, list[Run]]:
    """Runs every command in turn, ROUNDS times, on files outside the page cache. Removes outputs unless `kept`."""
    runs: dict[str, list[Run]] = {what: [] for what in commands}
    for _ in range(ROUNDS):
        last = None
        for what, (command, source, product) in commands.items():
            files = [path for path in source.rglob("*") if path.is_file()]
            # Below a virtual disk may be a cache that nobody can drop: the first to read would be the slowest.
            if source != last:
                remember(files)
            forget(files)
            last = source
            runs[what].append(run(command, product))
            print(f"{what}: {runs[what][-1].settled:.1f} s until the disk has it", file=sys.stderr)
            if product is not None and product not in kept:
                shutil.rmtree(product)
    return runs


def _anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has just ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def forget(files: Sequence[Path]) -> None:
    """Drops files from the page cache. Raises SystemExit when they stay there: then no run is cold."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    if (share := cached(files)) > 0.01:
        raise SystemExit(
            f"{share:.0%} of {files[0].parent} stays in the page cache: a run on cold files cannot be measured here"
        )


def remember(files: Sequence[Path]) -> None:
    """Reads files into the page cache."""
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass


def cached(files: Sequence[Path]) -> float:
    """The share of files that is in the page cache, 0 to 1 (mincore(2))."""
    libc, pages, found = ctypes.CDLL(None, use_errno=True), 0, 0
    for file in files:
        with (
            file.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE) as mapped,
        ):
            state = (ctypes.c_ubyte * (-(-len(mapped) // mmap.PAGESIZE)))()
            window = (ctypes.c_char * 1).from_buffer(mapped)
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(window)), ctypes.c_size_t(len(mapped)), state)
            del window
            if failed:
                raise SystemExit(f"mincore of {file}: {os.strerror(ctypes.get_errno())}")
            pages += len(state)
            found += sum(byte & 1 for byte in bytes(state))
    return found / max(pages, 1)
