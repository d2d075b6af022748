"""Large memory that is freed goes back to the system, wherever it lay."""

from __future__ import annotations

import subprocess
import sys

from processes import environment

# Matrices of 24 MiB, each with something small behind it that stays, so that the heap cannot shrink below it. Prints MiB that are resident and unused.
RUN = """
import re, sys, torch
from pathlib import Path
from ckptkit.allocator import give_back_large_memory

def resident():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

if sys.argv[1] == "give back":
    give_back_large_memory()
torch.ones(24 << 18)  # glibc learns from the first that is freed
kept, before = [], resident()
for _ in range(4):
    matrices = [torch.ones(6 << 20) for _ in range(4)]
    kept.append(bytearray(100_000))
    del matrices
print(resident() - before)
"""


def held(how: str) -> float:
    """MiB that a process holds after it has freed them."""
    done = subprocess.run([sys.executable, "-c", RUN, how], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_what_is_freed_is_not_held() -> None:
    assert held("give back") < 10
    # Otherwise there would be nothing to be done.
    assert held("as it is") > 20
