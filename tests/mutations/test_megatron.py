"""Every mutation of Megatron checkpoints is found, and nothing is found where nothing is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.nightly import daily

from mutations import MUTATIONS
from mutations.running import Run, clean, name_of, one_each, run, runs
from mutations.starts import Starts, labels

KINDS = ("megatron", "hybrid", "trained")
RUNS = runs(MUTATIONS, KINDS)


@pytest.mark.parametrize("label", labels(KINDS))
def test_a_clean_one_has_no_finding(label: str, starts: Starts) -> None:
    assert clean(label, starts) == []


@pytest.mark.parametrize("case", daily(RUNS, one_each(RUNS)), ids=name_of)
def test_it_is_found(case: Run, starts: Starts, tmp_path: Path) -> None:
    assert run(*case, starts, tmp_path).missed is None
