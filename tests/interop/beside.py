"""Starts tools that cannot share ckptkit's environment, in the one that `make test-interop` made beside it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def start(worker, *arguments, **environment):
    """Runs `workers/WORKER.py` with the tool's Python; returns what it printed. Fails with its last lines.

    The worker sees the tool, the stand-in for Transformer Engine, and nothing of ckptkit's tests. It takes no GPU.
    """
    if not (python := os.environ.get("INTEROP_PYTHON")):
        pytest.skip("needs the tool's environment: run `make test-interop TOOL=...`")
    run = subprocess.run(
        [python, "-W", "ignore", HERE / "workers" / f"{worker}.py", *arguments],
        env=os.environ
        | {
            "PYTHONPATH": f"{HERE / 'stand_ins'}:{HERE / 'workers'}",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        }
        | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if run.returncode:
        pytest.fail(f"{worker} stopped:\n" + "\n".join(run.stdout.splitlines()[-40:]), pytrace=False)
    return run.stdout


def start_jobs(worker, folder, jobs):
    (folder / "jobs.json").write_text(json.dumps(list(jobs)))
    start(worker, str(folder / "jobs.json"))
    results = json.loads((folder / "jobs.results").read_text())
    assert len(results) == len(jobs)
    for job, result in zip(jobs, results, strict=True):
        print(worker, job, result)  # the figures, with pytest -rP
    return results
