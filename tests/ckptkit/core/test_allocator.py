"""Large memory uses huge pages and returns to the system when freed, wherever it lay; small memory is reused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import environment

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

# Prints MiB of what /proc says of this process.
MEASURED = """
import re, sys
from pathlib import Path
from ckptkit.core.allocator import set_up_memory

def mib(file, what):
    return int(re.search(what + r":\\s+(\\d+)", Path(f"/proc/self/{file}").read_text())[1]) / 1024

if sys.argv[1] == "set up":
    set_up_memory()
import torch
"""

# Prints how much memory stays resident and unused after freeing matrices of so many MiB. A small block behind each
# keeps the heap from shrinking.
UNUSED = """
size = int(sys.argv[2]) << 18
torch.ones(size)  # glibc learns from the first that is freed
kept, before = [], mib("status", "RssAnon")
for _ in range(4):
    matrices = [torch.ones(size) for _ in range(4)]
    kept.append(bytearray(100_000))
    del matrices
print(mib("status", "RssAnon") - before)
"""

HUGE = """
matrix = torch.ones(16 << 20)
print(mib("smaps_rollup", "AnonHugePages"))
"""

# Memory of 512 KiB that is made and freed a hundred times, by a thread: how many pages the kernel had to give.
AGAIN = """
import resource, threading

import numpy as np

def make():
    first = np.ones(1 << 19, np.uint8)
    del first
    faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt)
    for _ in range(100):
        np.ones(1 << 19, np.uint8)
    faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt)

faults = []
thread = threading.Thread(target=make)
thread.start()
thread.join()
print(faults[1] - faults[0])
"""


def measured(code: str, how: str, *arguments: str) -> float:
    """What a process prints that has memory set up, or as it is."""
    given = {name: value for name, value in environment().items() if name != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURED + code, how, *arguments], env=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.parametrize("size", ["24", "4"])
def test_what_is_freed_is_not_held(size: str) -> None:
    assert measured(UNUSED, "set up", size) < 4
    # Otherwise there would be nothing to be done.
    assert measured(UNUSED, "as it is", size) > 4


def test_what_is_made_on_the_way_is_not_new_each_time() -> None:
    assert measured(AGAIN, "set up") < 1000  # of 12,800 pages


def test_a_large_tensor_is_made_of_huge_pages() -> None:
    if not HUGE_PAGES.exists() or "[madvise]" not in HUGE_PAGES.read_text():
        pytest.skip("this kernel gives huge pages to all, or to none")
    assert measured(HUGE, "set up") >= 16
    assert measured(HUGE, "as it is") == 0
