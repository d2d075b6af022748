"""The Triton kernel of FP8 without a GPU: in Triton's interpreter, which a process chooses when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[3]


@pytest.mark.nightly
def test_the_kernel_gives_the_bytes_of_the_formulas_and_marks_what_is_not_finite() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.triton_floats"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr
    # Ten formulas of blocks, with bfloat16 eight, in three dtypes; three matrices.
    assert done.stdout.splitlines() == [f"{(8 + 10 + 10) * 3} compared", "differ: []", "unmarked: []"]
