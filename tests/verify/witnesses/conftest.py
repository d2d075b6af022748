"""What the tests of recorded rollouts share."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import models, rollout_files
from support.rollout_files import Sample

from ckptkit.core.errors import CkptkitError
from verify.evidence.subject import Subject
from verify.witnesses.ending import Ending, ending_path
from verify.witnesses.rollouts import run


@dataclass(frozen=True)
class Recorded:
    """A checkpoint with tokens that it wrote and their log-probabilities in bfloat16, from the second token on."""

    path: Path
    tokens: list[list[int]]
    log_probs: list[list[float]]

    def samples(self, **fields: Any) -> list[Sample]:
        """What slime records of it."""
        return rollout_files.samples(self.tokens, self.log_probs, **fields)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A small model and a rollout of it."""
    path = tmp_path_factory.mktemp("rollouts") / "release"
    models.save("qwen2-untied", path)
    # Without this all tokens would be about as probable, at any temperature.
    models.edit(path, "model.norm.weight", models.tensors(path)["model.norm.weight"] * 10)
    rollout_files.add_tokenizer(path)
    tokens = rollout_files.tokens_of(path)
    return Recorded(path, tokens, rollout_files.log_probs_of(path, tokens))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs what would be processes of their own in this one; a test of the command line starts them."""

    def run_process(root: Path, subject: Subject, module: str, report: Path, more_s: float = 0) -> str | None:
        monkeypatch.setattr(sys, "argv", [module, str(root / "job-0.json")])
        try:
            importlib.import_module(module).main()
        except CkptkitError:
            ending = Ending.load(ending_path(report))
            return f"while {ending.phase}: {ending.said}"
        return None

    monkeypatch.setattr(run, "run_process", run_process)
