"""The environment of a process that a test starts: it finds the packages and the test modules, and sees no GPU."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def environment(**variables: str) -> dict[str, str]:
    """This process's own, with these variables, and CUDA hidden."""
    path = os.pathsep.join(filter(None, [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""} | variables
