"""Every mutation of Megatron checkpoints is found, and nothing is found where nothing is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutations import MUTATIONS
from mutations.mutation import Mutation
from mutations.running import clean, run, runs
from mutations.starts import Starts, labels

KINDS = ("megatron",)


@pytest.mark.parametrize("label", labels(KINDS))
def test_a_clean_one_has_no_finding(label: str, starts: Starts) -> None:
    assert clean(label, starts) == []


@pytest.mark.parametrize(
    ("mutation", "label"),
    [pytest.param(one, label, id=f"{one.name}, {label}") for one, label in runs(MUTATIONS, KINDS)],
)
def test_it_is_found(mutation: Mutation, label: str, starts: Starts, tmp_path: Path) -> None:
    assert run(mutation, label, starts, tmp_path).missed is None
