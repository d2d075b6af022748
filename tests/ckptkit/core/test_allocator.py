"""Large memory goes back to the system when it is freed, wherever it lay."""

from __future__ import annotations

import subprocess
import sys

import pytest
from processes import environment

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

# Makes and frees matrices of so many MiB, each followed by a small object that stays, so that the heap cannot
# shrink. Prints the MiB that are still resident.
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


def measured(code: str, how: str, *arguments: str) -> float:
    """What a process prints that has memory set up, or as it is."""
    given = {name: value for name, value in environment().items() if name != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURED + code, how, *arguments], env=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.parametrize("size", ["24", "4"])
def test_freed_matrices_go_back_to_the_system(size: str) -> None:
    assert measured(UNUSED, "set up", size) < 4
    # Without the set-up the allocator keeps it, so the test can fail.
    assert measured(UNUSED, "as it is", size) > 4
