"""What real Megatron computes on GPUs against transformers: both layer specs, and over NCCL with several ranks."""

from importlib.util import find_spec

import pytest
import torch

from ckptkit.verify.checks.witnesses.behaviour import judge_run
from ckptkit.verify.core.check import CheckResult
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.expected import config_of
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.run import verify
from ckptkit.verify.witnesses.megatron.run import run_megatron_logits
from ckptkit.verify.witnesses.process import interpreter
from ckptkit.verify.witnesses.reference.distance import distance
from ckptkit.verify.witnesses.reference.run import prompts_of

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
ENGINE = pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed")
ASKED = frozenset({"megatron", "logits"})
DENSE, EXPERTS, LATENT = FAMILIES = ("qwen2-untied", "qwen3_moe", "deepseek_v3")


def computed(subject, dtype):
    """Megatron's answers beside transformers', with the figures printed (pytest -s)."""
    run = run_megatron_logits(subject, prompts_of(config_of(subject), with_long=False), dtype)
    exact = run.reference.exact
    for rank, answers in run.answers.items():
        print(f"{subject.path.name} {run.sizes}, {run.device}, {dtype}, rank {rank}: {distance(answers, exact)}")
    print(f"noise of {run.reference.dtype}: {distance(run.reference.rounded, exact)}")
    return run


def agrees(run, subject):
    assert run.reference is not None
    assert list(judge_run(run, subject, CheckResult("", ""))) == []


@ENGINE
@pytest.mark.parametrize("name", FAMILIES)
def test_transformer_engine_computes_what_transformers_does(releases, converted, name):
    """The fused norm and linear layers, grouped products of experts, and latent attention."""
    subject = Subject(converted(name), releases(name), options=VerifyOptions(against=ASKED))
    run = computed(subject, "bfloat16")
    assert run.device == "NCCL on GPUs, Transformer Engine spec"
    agrees(run, subject)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_megatrons_own_layers_compute_what_transformers_does(releases, converted, monkeypatch, name, dtype):
    monkeypatch.setattr(interpreter, "find_spec", lambda name: None if "engine" in name else find_spec(name))
    subject = Subject(converted(name), releases(name), options=VerifyOptions(against=ASKED))
    run = computed(subject, dtype)
    assert run.device == "NCCL on GPUs, local spec"
    agrees(run, subject)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        (DENSE, {"tp": 2}),
        (DENSE, {"pp": 2}),
        (EXPERTS, {"tp": 2}),
        (EXPERTS, {"ep": 2}),
        (EXPERTS, {"tp": 2, "ep": 2}),
        (LATENT, {"tp": 2, "ep": 2}),
    ],
)
def test_ranks_over_nccl_compute_what_transformers_does(releases, converted, name, sizes, dtype):
    subject = Subject(converted(name), releases(name), options=VerifyOptions(**sizes, against=ASKED))
    run = computed(subject, dtype)
    assert run.device.startswith("NCCL on GPUs")
    agrees(run, subject)


def test_verify_judges_float32_and_the_dtype_of_the_checkpoint(releases, converted):
    report = verify(converted(EXPERTS), releases(EXPERTS), against=ASKED)
    assert {check.code: check.status for check in report.checks}["CK606"] == "passed", report.reasons
    lines = report.facts["log-probabilities in Megatron"]
    assert [" in float32 (" in lines[0], " in bfloat16 (" in lines[2], len(lines)] == [True, True, 3]
