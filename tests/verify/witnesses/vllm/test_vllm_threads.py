"""Faults of public threads about vLLM, planted in checkpoints: named, and the sound ones they were made of pass."""

import re

import pytest
from support import models
from support.sglang_runs import Case, draft_of, refusal
from support.vllm_runs import run_cases
from support.vllm_threads import THREADS, planted, sound

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

# What is unwritten, by HF name, in the model and in its draft model, of those that vLLM loads.
NAMED = {
    "a router built packed and never filled": r"model\.layers\.\d\.mlp\.gate\.weight(_packed|_scale|_shape)",
    "a router built in FP8 and never scaled": r"model\.layers\.\d\.mlp\.gate\.weight_scale_inv",
    "a bias of keys that no checkpoint has": r"model\.layers\.\d\.self_attn\.k_proj\.bias",
    "biases that the config alone has": r"model\.layers\.\d\.self_attn\.[qkv]_proj\.bias",
    "biases of a packed layer that no checkpoint has": r"model\.layers\.\d\.self_attn\.[qkv]_proj\.bias",
    "scales that are not there": r"model\.layers\.\d\.(self_attn\.\w+|mlp\.experts\.\d+\.\w+)\.weight_scale_inv",
}
COUNTS = {
    "a router built packed and never filled": 12,
    "a router built in FP8 and never scaled": 4,
    "a bias of keys that no checkpoint has": 4,
    "biases that the config alone has": 21,  # of six layers and the draft model's
    "biases of a packed layer that no checkpoint has": 12,
    "scales that are not there": 4 * (4 + 3 * 8),
}
# What vLLM says where it refuses the model or its draft model.
REFUSED = {
    "a router built packed and given plain": "layers.0.mlp.gate (ReplicatedLinear) are: ",
    "a draft built as its target is packed": "'model.layers.6.mtp_block.mlp.experts.routed_experts.w2_weight'",
    "a draft with latent attention built as its target is packed": (
        "KeyError: 'model.layers.4.mtp_block.mlp.experts.routed_experts.w2_weight'"
    ),
    "queries, keys and values of a draft built packed": (
        "KeyError: 'model.layers.6.mtp_block.self_attn.qkv_proj.weight'"
    ),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("threads")


@pytest.fixture(scope="module")
def runs(root, tmp_path_factory):
    cases = {}
    for number, (name, thread) in enumerate(THREADS.items()):
        cases[f"sound, before {name}"] = Case(sound(thread, root))
        cases[name] = Case(planted(thread, root, root / f"planted {number}"))
    return run_cases(cases, tmp_path_factory.mktemp("runs"))


def test_every_thread_is_expected():
    assert THREADS.keys() == NAMED.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", THREADS)
def test_the_sound_checkpoint_is_clean(name, root, runs):
    run = runs[f"sound, before {name}"]
    assert run.report is not None, run
    assert run.failure is None
    reports = [report for report in (run.report, draft_of(run)) if report is not None]
    for report in reports:
        assert (report.unwritten, report.dropped, report.differing, report.routers, report.rounded) == ((),) * 5
    given = {one for one in models.tensors(sound(THREADS[name], root)) if not one.endswith("weight_shape")}
    assert set().union(*(report.equal.keys() for report in reports)) >= given


@pytest.mark.parametrize("name", NAMED)
def test_what_no_checkpoint_gave_is_named(name, runs):
    run = runs[name]
    assert run.report is not None, run
    unwritten = [one for report in (run.report, draft_of(run)) if report is not None for one in report.unwritten]
    assert [one.tensor for one in unwritten if not re.fullmatch(NAMED[name], one.tensor)] == []
    assert len({one.tensor for one in unwritten}) == COUNTS[name]
    assert all("gave" in one.what for one in unwritten)


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_refuses_is_quoted(name, runs):
    run = runs[name]
    assert REFUSED[name] in str(run.failure).replace("\n", " "), run
    assert refusal(run)
