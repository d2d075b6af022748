"""`--logits` with `--against-megatron`: real Megatron's log-probabilities against transformers, and the verdicts."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support import models
from support.check_examples import hold_example
from support.fixture_types import PathOf
from support.installed import require_megatron

from ckptkit.app.cli import cli
from converters.megatron.parallel import ParallelSizes
from verify.check import Outcome, all_checks, run_checks
from verify.checks.witnesses import megatron_logits
from verify.evidence.subject import Subject
from verify.options import VerifyOptions
from verify.witnesses.megatron import run as megatron_run
from verify.witnesses.megatron.run import Computed, MegatronRun, run_megatron
from verify.witnesses.reference.job import Answers, Judged, Reference
from verify.witnesses.reference.residuals import Stage
from verify.witnesses.registry import with_implied

require_megatron()

INDEXER = pytest.mark.skipif(
    tuple(map(int, version("megatron-core").split(".")[:2])) < (0, 19), reason="this megatron-core has another indexer"
)
ASKED = frozenset({"megatron", "logits"})
ANSWER = Judged([-1.0, -2.0], [[7, 1], [8, 1]], [[-0.7, -1.4]] * 2)
NOISE = [0.001, 0.002] * 100  # of 200 tokens
SOUND = Stage("the attention of layer 0", [0.002] * 200, NOISE)


def run_witness(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a module of the tests run the ranks."""
    tests = str(Path(models.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")])))
    monkeypatch.setattr(megatron_run, "_WITNESS", name)


def test_logits_of_megatron_need_no_engine() -> None:
    assert with_implied(ASKED) == ASKED


@pytest.mark.usefixtures("served")
def test_megatron_computes_in_parallel_what_transformers_does(
    releases: PathOf, converted: PathOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks: tensor and expert parallelism within each of two pipeline stages, Transformer Engine installed."""
    run_witness("support.megatron_beside_engine", monkeypatch)
    outcome = judged(
        Subject(converted("qwen3_moe"), releases("qwen3_moe"), options=VerifyOptions(tp=2, pp=2, ep=2, against=ASKED))
    )
    assert (outcome.findings, outcome.checks[0].status) == ([], "passed"), outcome.reasons
    (found, noise) = outcome.facts["log-probabilities in Megatron"]
    assert "in float32 (TP2 PP2 EP2, gloo on the CPU, local spec) from transformers in float64: mean 0.0000" in found
    assert "transformers in float32 from float64: mean 0.0000, largest 0.000" in noise


def test_command_line_loads_and_computes(releases: PathOf, converted: PathOf, tmp_path: Path) -> None:
    """`verify --against-megatron --logits`, whole; on the CPU the dtype of the checkpoint is not run."""
    report = tmp_path / "report.json"
    words = ["verify", converted("qwen2-tied"), "--source", releases("qwen2-tied"), "--against-megatron", "--logits"]
    result = CliRunner().invoke(cli, [*map(str, words), "--tp", "2", "--report", str(report)])
    found = json.loads(report.read_text())
    status = {check["code"]: check["status"] for check in found["checks"]}
    assert {code: status[code] for code in ("CK401", "CK402", "CK606")} == {
        "CK401": "passed",
        "CK402": "passed",
        "CK606": "passed",
    }, result.output
    assert (result.exit_code, found["status"]) == (0, "passed")
    assert " in float32 (TP2 PP1, gloo on the CPU, " in found["facts"]["log-probabilities in Megatron"][0]


@pytest.mark.usefixtures("served")
def test_a_fault_of_parallel_ranks_alone_is_located(
    releases: PathOf, converted: PathOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank holds its slice, and the sum over ranks is left out of one layer."""
    run_witness("support.megatron_without_sum", monkeypatch)
    outcome = judged(
        Subject(converted("qwen2-untied"), releases("qwen2-untied"), options=VerifyOptions(tp=2, against=ASKED))
    )
    (finding,) = outcome.findings
    assert (finding.code, finding.severity, finding.rank) == ("CK606", "error", None)
    hold_example("CK606", finding)


def judged(subject: Subject) -> Outcome:
    """What CK606 says of a subject that Megatron loaded."""
    subject._results[run_megatron] = MegatronRun(ParallelSizes(), "the CPU", [], {})
    return run_checks(subject, [one for one in all_checks() if one.code == "CK606"])


def verdict(
    converted: PathOf, monkeypatch: pytest.MonkeyPatch, reference: Reference | None, name: str, **answers: Any
) -> Outcome:
    run = Computed("0.19.2", ParallelSizes(), "the CPU", answers.get("answers", {0: (ANSWER,)}), reference)
    monkeypatch.setattr(megatron_logits, "run_megatron_logits", lambda subject, prompts, dtype: run)
    return judged(Subject(converted(name), None, options=VerifyOptions(against=ASKED)))


def moved(by: float) -> Answers:
    return Answers([replace(ANSWER, tokens=[token + by for token in ANSWER.tokens])])


def reference(by: float, *stages: Stage, unseen: str | None = None) -> Reference:
    """Megatron's log-probabilities are `by` away; the noise is 0.001."""
    return Reference("float32", moved(by), moved(by + 0.001), stages, unseen)


def test_log_probabilities_within_the_noise_pass(converted: PathOf, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = verdict(converted, monkeypatch, reference(0.009, SOUND), "qwen2-tied")
    assert (outcome.findings, outcome.checks[0].status) == ([], "passed")


def test_the_first_part_that_differs_is_named_with_both_figures(
    converted: PathOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Stage("the MLP of layer 7", [0.5] * 200, NOISE)
    later = [Stage(f"the MLP of layer {layer}", [0.5] * 200, NOISE) for layer in (8, 9, 10, 11)]
    outcome = verdict(converted, monkeypatch, reference(0.011, SOUND, wrong, *later), "qwen2-tied")
    (finding,) = outcome.findings
    assert finding.expected == "log-probabilities within 10 times the noise of float32 (mean 0.001)"
    assert finding.actual == (
        "mean 0.011; the first part that differs is the MLP of layer 7, by up to 0.5 where the noise is 0.002; then "
        "the MLP of layer 8, the MLP of layer 9, the MLP of layer 10 and 1 more, of 6 parts"
    )
    assert finding.hint.startswith("compare that layer's gate and up, its router and experts")


def test_rounding_that_no_part_explains_is_a_note(converted: PathOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part computes the same of the same input, so the whole is the same model."""
    outcome = verdict(converted, monkeypatch, reference(0.02, SOUND), "qwen3_moe")
    assert outcome.findings == []
    assert "0.02 from transformers', though none of 1 parts of the model differs" in outcome.facts["notes"][0]


@pytest.mark.parametrize(("name", "severity"), [("qwen2-tied", "error"), ("qwen3_moe", "warning")])
def test_parts_that_are_not_seen_are_not_guessed(
    converted: PathOf, monkeypatch: pytest.MonkeyPatch, name: str, severity: str
) -> None:
    outcome = verdict(converted, monkeypatch, reference(0.02, unseen="no list of 12 modules"), name)
    (finding,) = outcome.findings
    assert (finding.actual, finding.severity) == ("mean 0.02; where is not seen: no list of 12 modules", severity)


def test_a_rank_that_alone_answers_otherwise_is_named(converted: PathOf, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {0: (ANSWER,), 1: tuple(moved(0.5).judged)}
    (finding,) = verdict(converted, monkeypatch, reference(0.0, SOUND), "qwen3_moe", answers=answers).findings
    assert (finding.rank, finding.actual, finding.hint) == ("rank 1", "mean 0.5", "these ranks alone are wrong")


def test_answers_of_megatron_that_are_no_numbers_fail(converted: PathOf, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {0: (replace(ANSWER, tokens=[math.nan, -1.0]),)}
    (finding,) = verdict(converted, monkeypatch, None, "qwen2-tied", answers=answers).findings
    assert finding.actual == "1 of 2 are not"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("minimax_m2", "transformers turns whole heads of this model unless rope_parameters has a"),
        pytest.param("glm_moe_dsa", "takes no notice of indexer_rope_interleave", marks=INDEXER),
    ],
)
def test_a_model_that_transformers_takes_otherwise_is_inconclusive(converted: PathOf, name: str, said: str) -> None:
    """Their releases' config.json; test_families.py shows that Megatron is right about them."""
    outcome = judged(Subject(converted(name), None, options=VerifyOptions(against=ASKED)))
    assert (outcome.findings, outcome.checks[0].status) == ([], "skipped")
    assert said in outcome.reasons[0]


def test_a_load_that_failed_leaves_logits_out(converted: PathOf) -> None:
    subject = Subject(converted("qwen2-tied"), None, options=VerifyOptions(against=ASKED))
    subject._results[run_megatron] = MegatronRun(ParallelSizes(), "the CPU", [], {0: "KeyError: a key"})
    (check,) = run_checks(subject, [one for one in all_checks() if one.code == "CK606"]).checks
    assert (check.status, check.reason) == ("skipped", "a rank did not finish loading, see CK401")
