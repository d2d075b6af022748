"""Real vLLM on a GPU: checkpoints load, and what its steps after loading make for the kernels is what was loaded."""

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from support.sglang_runs import reported
from support.vllm_formats import CLEAN
from support.vllm_runs import run_cases
from support.vllm_steps import LABELS, Steps, all_runs

from ckptkit.verify.run import verify

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    paths, runs = all_runs(tmp_path_factory.mktemp("steps"), partial(run_cases, gpu=True))
    if out := os.environ.get("OUT"):
        (Path(out) / "vllm_steps.json").write_text(json.dumps(summary(runs), indent=1))
    return paths, runs


def summary(runs):
    """What became of each, for whoever reads it without the machine."""
    found = {}
    for name, run in runs.items():
        if (report := run.report) is None:
            found[name] = {"failure": str(run.failure)}
            continue
        wrong = (*report.unwritten, *report.dropped, *report.differing, *report.routers, *(report.repacked or ()))
        found[name] = {
            "wrong": [f"{one.param}: {one.what}" for one in wrong[:5]],
            "seen": report.repacked_seen,
            "unchecked": report.unchecked[:3],
            "requantized": [len(report.requantized), max(report.requantized.values(), default=0.0)],
            "draft": run.failure and str(run.failure),
        }
    return found


class TestSteps(Steps):
    """With vLLM's kernels."""


@pytest.mark.parametrize("label", CLEAN)
def test_it_was_on_the_gpu(label, made):
    report = reported(made[1][label])
    assert report.device == torch.cuda.get_device_name()


@pytest.mark.parametrize("label", ["moe, groups of 32", "mla, FP8"])
def test_verify_against_vllm_on_the_gpu_passes(label, made):
    report = verify(made[0][label], against=frozenset({"vllm"}), readers=("vllm",))
    assert report.status == "passed", (report.findings, report.reasons)
    checks = {check.code: check.status for check in report.checks if check.code.startswith("CK52")}
    assert checks["CK526"] == "passed"


def test_every_checkpoint_was_made(made):
    assert made[0].keys() == set(LABELS)
