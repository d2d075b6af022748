"""What the tests of recorded rollouts share, and those that load many checkpoints into real SGLang."""

import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import models, rollout_files
from support.sglang_runs import checked, run_cases

from ckptkit.core.errors import CkptkitError
from ckptkit.verify.witnesses import runner


@dataclass(frozen=True)
class Recorded:
    """A checkpoint with tokens that it wrote and their log-probabilities in bfloat16, from the second token on."""

    path: Path
    tokens: list[list[int]]
    log_probs: list[list[float]]

    def samples(self, **fields):
        return rollout_files.samples(self.tokens, self.log_probs, **fields)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("rollouts") / "release"
    models.save("qwen2-untied", path)
    # Without this all tokens would be about as probable, at any temperature.
    models.edit(path, "model.norm.weight", models.tensors(path)["model.norm.weight"] * 10)
    rollout_files.add_tokenizer(path)
    tokens = rollout_files.tokens_of(path)
    return Recorded(path, tokens, rollout_files.log_probs_of(path, tokens))


@pytest.fixture
def in_process(monkeypatch):
    """Runs what would be processes of their own in this one; a test of the command line starts them."""

    def run_ranks(root, ranks, module, *_, **__):
        monkeypatch.setattr(sys, "argv", [module, str(root / "job-0.json")])
        monkeypatch.delitem(sys.modules, module, raising=False)  # else runpy warns that another test imported it
        try:
            runpy.run_module(module, run_name="__main__")
        except CkptkitError:
            return {0: "exit code 1"}
        return {}

    monkeypatch.setattr(runner, "run_ranks", run_ranks)


@pytest.fixture(scope="module")
def runs(cases, tmp_path_factory):
    return run_cases(cases, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def judged(cases, runs):
    """`judged(name)`: results, findings and facts of the checks, of what became of a case."""
    return lambda name: checked(cases[name], runs[name])
