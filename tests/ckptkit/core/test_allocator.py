"""Large memory that is freed goes back to the system, wherever it lay."""

import pytest
from support.nightly import daily
from support.processes import python

# Makes matrices of so many MiB, each with something small after it that stays, so that the heap cannot shrink below it.
# Prints the MiB that are resident and unused afterwards.
UNUSED = """
import re, sys
from pathlib import Path
from ckptkit.core.allocator import return_freed_memory

if sys.argv[1] == "return":
    return_freed_memory()
import torch

def resident():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

size = int(sys.argv[2]) << 18
torch.ones(size)  # glibc learns from the first that is freed
kept, before = [], resident()
for _ in range(4):
    matrices = [torch.ones(size) for _ in range(4)]
    kept.append(bytearray(100_000))
    del matrices
print(resident() - before)
"""


@pytest.mark.parametrize("size", daily(("24", "4"), ("24",)))
def test_freed_matrices_are_returned_where_malloc_would_keep_them(size):
    unused = {}
    for how in ("return", "keep"):
        done = python("-c", UNUSED, how, size)
        assert (done.returncode, done.stderr) == (0, "")
        unused[how] = float(done.stdout)
    assert unused["return"] < 4 < unused["keep"]
