"""`--logits` with `--against-megatron`: real Megatron's log-probabilities against transformers, and the verdicts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest

from ckptkit.app.api import convert
from converters.megatron.parallel import ParallelSizes
from verify.check import Outcome, all_checks, run_checks
from verify.checks.witnesses import behaviour
from verify.evidence.subject import Subject
from verify.run import verify
from verify.witnesses.engine.job import Answers, Judged
from verify.witnesses.megatron.job import RankReport
from verify.witnesses.megatron.run import MegatronRun, run_megatron

pytest.importorskip("megatron.core")

ANSWER = Judged([-1.0, -2.0], [[7, 1], [8, 1]], [[-0.7, -1.4]] * 2)
REPORT = RankReport(0, "0.19.2", 0, 0, 0, ((0,),), 1, (), (), (), (), (ANSWER,))


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logits")
    models.save("qwen2-tied", path / "hf")
    convert(path / "hf", path / "megatron")
    return path


def test_megatron_computes_what_transformers_does_and_no_engine_is_asked(release: Path) -> None:
    report = verify(release / "megatron", release / "hf", against=frozenset({"megatron", "logits"}))
    status = {check.code: check.status for check in report.checks if check.code[:3] in ("CK4", "CK5", "CK6")}
    assert status == dict.fromkeys(("CK401", "CK402", "CK403", "CK404", "CK606"), "passed"), report.reasons
    (found, noise) = report.facts["log-probabilities in Megatron"]
    assert "both in float32: mean 0.0000, largest 0.000" in found
    assert "transformers in bfloat16 from float32: mean 0.00" in noise
    assert "mean 0.0000" not in noise


def verdict(release: Path, monkeypatch: pytest.MonkeyPatch, report: RankReport, reference: Any) -> Outcome:
    subject = Subject(release / "megatron", release / "hf", against=frozenset({"megatron", "logits"}))
    subject._results[run_megatron] = MegatronRun(ParallelSizes(), "the CPU", [REPORT], {})
    monkeypatch.setattr(behaviour, "run_megatron_logits", lambda subject, prompts: report)
    monkeypatch.setattr(behaviour, "judged_by_transformers", lambda subject, prompts, ids: reference)
    return run_checks(subject, [one for one in all_checks() if one.code == "CK606"])


def moved(by: float) -> Answers:
    return Answers([replace(ANSWER, tokens=[token + by for token in ANSWER.tokens])])


def test_logits_apart_by_more_than_float32_fail(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a noise of 0.02 in bfloat16 a tenth is 0.002."""
    reference = {"float32": moved(0.001), "bfloat16": moved(0.021)}
    assert verdict(release, monkeypatch, REPORT, reference).findings == []
    (finding,) = verdict(release, monkeypatch, REPORT, {"float32": moved(0.003), "bfloat16": moved(0.023)}).findings
    assert (finding.code, finding.severity) == ("CK606", "error")
    assert finding.actual.startswith("0.15 times: mean 0.0030")


def test_answers_of_megatron_that_are_no_numbers_fail(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = replace(REPORT, judged=(replace(ANSWER, tokens=[math.nan, -1.0]),))
    (finding,) = verdict(release, monkeypatch, report, {}).findings
    assert finding.actual == "1 of 2 are not"


def test_a_load_that_failed_leaves_logits_out(release: Path) -> None:
    subject = Subject(release / "megatron", release / "hf", against=frozenset({"megatron", "logits"}))
    subject._results[run_megatron] = MegatronRun(ParallelSizes(), "the CPU", [], {0: "KeyError: a key"})
    (check,) = run_checks(subject, [one for one in all_checks() if one.code == "CK606"]).checks
    assert (check.status, check.reason) == ("skipped", "a rank did not finish loading, see CK401")
