"""Ten runs that are killed at random moments and resumed; `support.kills` does as many as one likes."""

from __future__ import annotations

import json

import pytest
from support.processes import python


@pytest.mark.nightly
def test_what_was_killed_and_resumed_is_what_an_undisturbed_run_writes() -> None:
    # In a process of its own, because it forks.
    done = python("-m", "support.kills", "--runs", "10")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["runs"] == 10
    assert found["kills"] >= 10
