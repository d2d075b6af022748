"""`--logits` with `--against-megatron`: real Megatron's log-probabilities against transformers, and the verdicts."""

import json
import math
from dataclasses import replace

import pytest
from click.testing import CliRunner
from families import CASES
from families.table import config_of
from support.installed import require_megatron
from support.messages import text_with
from support.processes import environment

from ckptkit.app.cli import cli
from ckptkit.converters.megatron.parallel import ParallelSizes
from ckptkit.converters.planner import dims_of
from ckptkit.verify.checks.witnesses import behaviour
from ckptkit.verify.core.check import all_checks
from ckptkit.verify.core.run import run_checks
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.witnesses.megatron import run as megatron_run
from ckptkit.verify.witnesses.megatron.run import Computed, MegatronRun, run_megatron
from ckptkit.verify.witnesses.reference.job import Judged, Reference

require_megatron()

ASKED = frozenset({"megatron", "logits"})
ANSWER = Judged([-1.0, -2.0], [[7, 1], [8, 1]], [[-0.7, -1.4]] * 2)


def run_broken(how, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setenv("BREAK", how)
    monkeypatch.setattr(megatron_run, "_WITNESS", "support.broken_witness")


@pytest.mark.usefixtures("served")
def test_megatron_computes_in_parallel_what_transformers_does(releases, converted, monkeypatch):
    """Four ranks: tensor and expert parallelism within each of two pipeline stages, Transformer Engine installed."""
    run_broken("beside an engine", monkeypatch)
    options = VerifyOptions(tp=2, pp=2, ep=2, against=ASKED)
    outcome = judged(Subject(converted("qwen3_moe"), releases("qwen3_moe"), options=options))
    assert (outcome.findings, outcome.checks[0].status) == ([], "passed"), outcome.reasons
    (found, noise) = outcome.facts["log-probabilities in Megatron"]
    assert "in float32 (TP2 PP2 EP2, gloo on the CPU, local spec) from transformers in float32: mean 0.0000" in found
    assert noise.startswith("transformers in bfloat16 from float32: mean 0.0")


@pytest.mark.usefixtures("served")
def test_command_line_loads_and_computes(releases, converted, tmp_path):
    """`verify --against-megatron --logits`, whole; on the CPU the dtype of the checkpoint is not run."""
    report = tmp_path / "report.json"
    words = ["verify", converted("qwen2-tied"), "--source", releases("qwen2-tied"), "--against-megatron", "--logits"]
    result = CliRunner().invoke(cli, [*map(str, words), "--tp", "2", "--report", str(report)])
    found = json.loads(report.read_text())
    status = {check["code"]: check["status"] for check in found["checks"]}
    assert {status[code] for code in ("CK401", "CK402", "CK606")} == {"passed"}, result.output
    assert (result.exit_code, found["status"]) == (0, "passed")
    assert " in float32 (TP2 PP1, gloo on the CPU, " in found["facts"]["log-probabilities in Megatron"][0]


@pytest.mark.usefixtures("served")
def test_a_fault_of_parallel_ranks_alone_is_found(releases, converted, monkeypatch):
    """Every rank holds its slice, and the sum over ranks is left out of one layer."""
    run_broken("without a sum", monkeypatch)
    options = VerifyOptions(tp=2, against=ASKED)
    (finding,) = judged(Subject(converted("qwen2-untied"), releases("qwen2-untied"), options=options)).findings
    assert (finding.code, finding.severity, finding.rank) == ("CK606", "error", None)


def judged(subject, failures=None):
    subject._results[run_megatron,] = MegatronRun(ParallelSizes(), "the CPU", [], failures or {})
    return run_checks(subject, [one for one in all_checks() if one.code == "CK606"])


def moved(by):
    return [replace(ANSWER, tokens=[token + by for token in ANSWER.tokens])]


@pytest.fixture
def verdict(converted, monkeypatch):
    """`verdict(by)`: CK606 where Megatron's log-probabilities are `by` away and the noise of bfloat16 is 0.001."""

    def of(by, answers=None, dtype="float32"):
        reference = None if by is None else Reference("bfloat16", moved(by), moved(by + 0.001))
        run = Computed("0.19.2", ParallelSizes(), "the CPU", dtype, answers or {0: (ANSWER,)}, reference)
        monkeypatch.setattr(behaviour, "run_megatron_logits", lambda subject, prompts, dtype: run)
        return judged(Subject(converted("qwen2-tied"), None, options=VerifyOptions(against=ASKED)))

    return of


@pytest.mark.parametrize(
    ("dtype", "by", "passes"),
    [
        ("float32", 0.00009, True),
        ("float32", 0.00011, False),
        ("bfloat16", 0.0029, True),
        ("bfloat16", 0.0031, False),
        ("float32", math.nan, False),
    ],
)
def test_megatron_is_within_the_noise_of_the_dtype(verdict, dtype, by, passes):
    outcome = verdict(by, dtype=dtype)
    assert [(one.code, one.severity, one.rank) for one in outcome.findings] == [("CK606", "error", None)] * (not passes)
    assert outcome.checks[0].status == ("passed" if passes else "failed")


def test_a_rank_that_alone_answers_otherwise_is_named(verdict):
    (finding,) = verdict(0.0, {0: (ANSWER,), 1: tuple(moved(0.5))}).findings
    assert (finding.rank, finding.actual) == ("rank 1", text_with("0.5"))


def test_answers_of_megatron_that_are_no_numbers_fail(verdict):
    (finding,) = verdict(None, {0: (replace(ANSWER, tokens=[math.nan, -1.0]),)}).findings
    assert finding.actual == text_with("1 2")


# By test model; of every other one megatron-core computes all layers itself.
NOT_COMPUTED = {
    **dict.fromkeys(("nemotron_h", "nemotron_h-latent"), "Megatron's Mamba layer"),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text-tied"), "Megatron's gated delta net"),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), "Megatron's gated delta net"),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "glm_moe_dsa-shared"), "Megatron's sparse attention"),
    **dict.fromkeys(("gemma3_text", "gemma3_text-v4", "gemma3", "glm4", "glm4-tied"), "megatron-core has no norms"),
    "minimax_m2": "megatron-core has no query",
}


def test_models_whose_layers_are_not_megatrons_own_are_not_compared():
    found = {name: megatron_run._not_computed(dims_of(config_of(case))) for name, case in CASES.items()}
    assert {name for name, reason in found.items() if reason} == NOT_COMPUTED.keys()
    assert all(str(found[name]).startswith(start) for name, start in NOT_COMPUTED.items())


def test_a_model_that_is_not_compared_is_inconclusive(converted):
    outcome = judged(Subject(converted("minimax_m2"), None, options=VerifyOptions(against=ASKED)))
    assert (outcome.findings, outcome.checks[0].status) == ([], "skipped")
    assert NOT_COMPUTED["minimax_m2"] in outcome.reasons[0]


def test_a_load_that_failed_leaves_logits_out(converted):
    subject = Subject(converted("qwen2-tied"), None, options=VerifyOptions(against=ASKED))
    outcome = judged(subject, {0: "KeyError: a key"})
    assert (outcome.checks[0].status, outcome.checks[0].reason) == ("skipped", text_with("CK401"))
