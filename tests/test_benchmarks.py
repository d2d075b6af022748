"""Every section of `make bench` runs: once, on the smallest model that it has."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from support.processes import python

from benchmarks import run

NEEDS = {"witness": "sglang", "megatron": "megatron", "layouts": "megatron", "ray": "ray"}
# What each row of a section says, whatever it measures.
COLUMNS = {
    "kernels": {"what", "seconds", "baseline", "ratio"},
    "cuda": {"layer", "way"},
    "offline": {"what", "on disk", "ratio to cat"},
    "convert": {"what", "seconds", "ratio to cp -r"},
    "scale": {"GB", "what", "seconds"},
    "verifier": {"GB", "what", "seconds"},
    "witness": {"model", "witness", "ratio"},
    "megatron": {"what", "seconds", "ratio to the plain load"},
    "layouts": {"ranks", "seconds", "largest process MiB"},
    "plan": {"what", "seconds", "peak MiB"},
    "launches": {"launch", "seconds", "seconds again"},
    "ray": {"workers", "seconds", "throughput to 1 worker's"},
}


def test_every_section_is_run_here() -> None:
    assert set(run.SECTIONS) == set(COLUMNS)


# Sections whose processes are forked from one, since all of them import the same. Others measure in their own process.
TOGETHER = (
    ("offline", "convert", "scale", "verifier", "plan", "launches"),
    ("witness",),
    ("megatron", "layouts"),
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, object]]]:
    """`measured(section)`: the rows of a section, which is run with those that are run together with it."""
    found: dict[str, list[dict[str, object]]] = {}

    def rows(section: str) -> list[dict[str, object]]:
        if section not in found:
            group = next((one for one in TOGETHER if section in one), None)
            folder = tmp_path_factory.mktemp("bench")
            how = ("-m", "support.forked_benchmarks") if group else (run.__file__,)
            with contextlib.chdir(folder):
                done = python("-W", "ignore", *how, *(group or [section]), BENCH_SMALLEST="1", BENCH_DIR=str(folder))
            assert done.returncode == 0, done.stderr[-3000:]
            assert [path.name for path in folder.iterdir()] == ["bench.json"]
            found.update(json.loads((folder / "bench.json").read_text()))
        return found[section]

    return rows


@pytest.mark.parametrize("section", COLUMNS)
def test_section_measures_its_smallest_model(section: str, measured: Callable[[str], list[dict[str, object]]]) -> None:
    if section in NEEDS and find_spec(NEEDS[section]) is None:
        pytest.skip(f"needs {NEEDS[section]}")
    if section == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    rows = measured(section)
    assert rows
    for row in rows:
        assert COLUMNS[section] <= row.keys()
