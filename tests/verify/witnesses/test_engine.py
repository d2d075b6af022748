"""The engine witness without a GPU: read-back, reference, distances, and what the checks make of reports."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.messages import text_with
from torch import nn
from transformers import AutoModelForCausalLM

from ckptkit.app.api import quantize
from ckptkit.app.cli import cli
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.checks.witnesses import engine as engine_checks
from ckptkit.verify.core.check import all_checks
from ckptkit.verify.core.run import run_checks
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.run import verify
from ckptkit.verify.witnesses import runner
from ckptkit.verify.witnesses.live import process
from ckptkit.verify.witnesses.live import run as engine_run
from ckptkit.verify.witnesses.live.job import AGAIN, FIRST, RESUMED, EngineJob, EngineReport, Reload
from ckptkit.verify.witnesses.live.run import EngineRun
from ckptkit.verify.witnesses.live.server import NotTried, RefusedByEngine
from ckptkit.verify.witnesses.loading.job import ONE_RANK
from ckptkit.verify.witnesses.process.exit_report import ExitReport
from ckptkit.verify.witnesses.reference.distance import best_tokens, distance, not_finite_logprobs
from ckptkit.verify.witnesses.reference.job import Judged, Reference, ReferenceJob
from ckptkit.verify.witnesses.reference.process import run as run_reference
from ckptkit.verify.witnesses.reference.run import prompts_of
from ckptkit.verify.witnesses.sglang.live import readback

ASKED = frozenset({"engine", "update", "release-resume", "logits"})
CODES = ("CK511", "CK512", "CK513", "CK601")
HALF = math.log(0.5)


def judged(*tokens, best=7, top=HALF):
    return Judged(tokens, [[best, 1]] * len(tokens), [[top, math.log(0.25)]] * len(tokens))


def test_distance_of_answers_is_as_worked_out_by_hand():
    found = distance([judged(-1.0, -2.0), judged(-3.0)], [judged(-1.5, -2.0), judged(-2.0, best=8, top=math.log(0.25))])
    assert (found.mean, found.largest) == (0.5, 1.0)
    # Of three positions one differs: 0.5 ln 2 + 0.25 ln (0.25 / 0.5).
    assert found.divergence == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 3)
    assert found.overlap == pytest.approx((1 + 1 + 0.5) / 3)
    assert found.parted == (1, 1)
    same = distance([judged(-1.0, -2.0)], [judged(-1.0, -2.0)])
    assert (same.mean, same.divergence, same.overlap, same.parted) == (0.0, 0.0, 1.0, None)
    assert not_finite_logprobs([judged(-1.0, math.nan, -math.inf)]) == (2, 3)
    assert best_tokens([judged(-1.0), judged(-1.0, best=3)]) == 2


def test_prompts_are_fixed_and_leave_special_tokens_out():
    config = {"text_config": {"vocab_size": 12, "eos_token_id": [3, 4], "max_position_embeddings": 64}}
    prompts = prompts_of(config | {"image_token_id": 5}, with_long=True)
    assert prompts == prompts_of(config | {"image_token_id": 5}, with_long=True)
    assert [len(prompt) for prompt in prompts] == [48] * 8 + [56]
    assert {token for prompt in prompts for token in prompt} == {0, 1, 2, *range(6, 12)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.linear.register_buffer("cache", torch.arange(4.0), persistent=False)
        self.linear.derived = torch.ones(2, dtype=torch.bfloat16)


def read_back(model, path):
    readback.record(model, [(str(path), torch.zeros(1))])
    (file,) = path.parent.glob(f"{path.name}.0.Model.json")
    return json.loads(file.read_text())["held"]


def test_read_back_sees_every_bit_of_parameters_buffers_and_attributes(tmp_path):
    model = Model()
    before = read_back(model, tmp_path / "before")
    assert {name: size for name, (_, size) in before.items()} == {
        "linear.weight": 24,
        "linear.bias": 8,
        "linear.cache": 16,
        "linear.derived": 4,
    }
    with torch.no_grad():
        model.linear.bias[0] = -model.linear.bias[0]
        model.linear.cache[1] = -0.0
        model.linear.derived[1] = 2
    after = read_back(model, tmp_path / "after")
    assert {name for name in before if before[name] != after[name]} == {"linear.bias", "linear.cache", "linear.derived"}


def test_resumed_memory_is_poisoned_but_for_buffers_and_defaults():
    model = Model()
    model.linear.k_scale = nn.Parameter(torch.ones(()))
    readback.fill(model, [])
    assert model.linear.weight.isnan().all()
    assert model.linear.k_scale == 1
    assert model.linear.cache.tolist() == [0, 1, 2, 3]


def test_reference_is_what_transformers_computes(releases, tmp_path):
    release = releases("qwen3_moe")
    prompts, ids = [[5, 9, 2, 40]], [[[1, 2], [3, 4], [5, 6]]]
    found = reference(release, tmp_path, prompts, ids)
    assert found.dtype == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(release, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(prompts)).logits[0]
    probabilities = logits.softmax(-1)
    (answer,) = found.exact
    for position, token in enumerate(prompts[0][1:]):
        assert answer.tokens[position] == pytest.approx(float(probabilities[position, token].log()), abs=1e-5)
        expected = [float(probabilities[position, one].log()) for one in ids[0][position]]
        assert answer.top[position] == pytest.approx(expected, abs=1e-5)
        assert answer.top_ids[position][0] == int(logits[position].argmax())


def test_reference_of_an_int4_checkpoint_uses_its_dequantized_weights(releases, tmp_path):
    release = releases("qwen3_moe")
    quantize(release, tmp_path / "int4", QuantScheme(32, "qmax7", (r"re:.*\.self_attn\..*", r"re:.*\.mlp\.gate$")))
    prompts, ids = [[5, 9, 2, 40, 11, 30]], [[[1, 2]] * 5]
    plain, packed = (reference(path, tmp_path, prompts, ids).exact for path in (release, tmp_path / "int4"))
    assert 0 < distance(packed, plain).mean < 0.1


def reference(path, root, prompts, ids, **asked):
    job = ReferenceJob(path, str(root / "reference.json"), prompts, ids, **asked)
    with ExitReport(root / "reference.json") as phases:
        return run_reference(job, phases)


class FakeServer:
    """Stands for an engine: what each step does to what it holds."""

    def __init__(self, lost="", refusal=None):
        self._loaded = {"0 a": ("x", 8), "0 b": ("y", 8), "0 layers.0.attn.k_scale": ("s", 4)}
        self._held = dict(self._loaded)
        self._lost, self._refusal = lost, refusal
        self.calls: list[str] = []

    def held(self):
        return dict(self._held)

    def answers(self):
        return [judged(-1.0)]

    def check(self, action):
        return [name[2:] for name in self._held if self._held[name] != self._loaded[name]]

    def snapshot_and_poison(self):
        self._set("poison", dict.fromkeys(("0 a", "0 b"), ("poison", 8)))

    def release_and_resume(self):
        self._set("resume", dict.fromkeys(("0 a", "0 b"), ("poison", 8)))

    def update_by_tensor(self):
        self._set("tensor", self._loaded)

    def update_from_disk(self):
        if self._refusal:
            raise self._refusal
        self._set("disk", self._loaded)

    def _set(self, call, tensors):
        self.calls.append(call)
        self._held |= {name: tensor for name, tensor in tensors.items() if call == "poison" or name != self._lost}


EVERY = ["poison", "tensor", "tensor", "poison", "disk", "disk", "resume", "tensor"]
CLEAN = ("", True, [])


@pytest.mark.parametrize(
    ("server", "calls", "reloads"),
    [
        (FakeServer(), EVERY, [CLEAN] * 5),
        (FakeServer(lost="0 b"), EVERY, [("", True, ["0 b"])] * 5),
        (FakeServer(refusal=RefusedByEngine("no loader")), EVERY[:4], [CLEAN, CLEAN, ("no loader", True, [])]),
        (
            FakeServer(refusal=NotTried("not here")),
            [*EVERY[:4], *EVERY[6:]],
            [CLEAN, CLEAN, ("not here", False, []), CLEAN],
        ),
    ],
    ids=["sound", "leaves a tensor out", "refuses to update from disk", "cannot be updated from disk"],
)
def test_steps_of_an_engine_and_what_they_leave(server, calls, reloads, monkeypatch, tmp_path):
    """A refusal ends them; what is not tried does not."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    job = EngineJob("", [[1, 2]], "", update=True, release_resume=True)
    with ExitReport(tmp_path / "ending") as phases:
        *_, report = process._reports(job, server, phases, "0.5.16")
    assert server.calls == calls
    assert [(one.refused, one.tried, list(one.changed)) for one in report.reloads] == reloads
    assert report.reloads[0].unequal == (["b"] if reloads[0][2] else [])
    assert (report.complete, report.held, report.held_bytes) == (True, 3, 20)


def sound():
    answers = [judged(-1.0, -2.0)]
    names = ("updating by tensor again", RESUMED)
    passes = {FIRST: answers, AGAIN: answers, **dict.fromkeys(names, answers)}
    reloads = [Reload(name) for name in names]
    return EngineReport("0.5.16", "a GPU", passes, 3, 20, (), reloads, complete=True)


EXACT = Reference("bfloat16", [judged(-1.01, -2.01)], [judged(-1.03, -2.03)])
UPDATED = "updating by tensor again"


@pytest.fixture
def verdict(monkeypatch, tmp_path):
    """`verdict(report)`: what the checks make of an engine's report, and perhaps of that of a `draft` engine."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')

    def of(report, reference=EXACT, draft=None, why=None):
        monkeypatch.setattr(engine_checks, "run_engine", lambda subject: EngineRun(report, [[1, 2, 3]], why))
        monkeypatch.setattr(engine_checks, "run_draft_engine", lambda subject: draft)
        monkeypatch.setattr(engine_checks, "run_engine_reference", lambda subject: reference)
        checks = [one for one in all_checks() if one.code in CODES]
        return run_checks(Subject(tmp_path, options=VerifyOptions(against=ASKED)), checks)

    return of


def reloaded(*reloads):
    return replace(sound(), reloads=reloads)


def answered(first, again):
    return replace(sound(), passes={FIRST: [first], AGAIN: [again]})


def failed(outcome):
    return {result.code for result in outcome.checks if result.status == "failed"}


def test_a_sound_engine_passes(verdict):
    outcome = verdict(sound())
    assert [(result.code, result.status) for result in outcome.checks] == [(code, "passed") for code in CODES]


W2 = [f"1 model.layers.{layer}.w2" for layer in (3, 4)]
KEPT = "model.layers.0.self_attn"
# Reloads, and the findings: code, tensor, rank and severity.
FOUND = {
    "changed tensors": (
        [
            Reload(UPDATED, changed=W2, unequal=["model.layers.3.w2", "head"]),
            Reload(RESUMED, changed=["0 model.cache"]),
        ],
        [
            ("CK512", "model.layers.{3..4}.w2", "1", "error"),
            ("CK512", "head", None, "error"),
            ("CK513", "model.cache", "0", "error"),
        ],
    ),
    "scales of a cache, which resuming loses": (
        [Reload(UPDATED), Reload(RESUMED, changed=[f"0 {KEPT}.attn_mqa.k_scale", f"0 {KEPT}.w_kc"])],
        [("CK513", f"{KEPT}.attn_mqa.k_scale", "0", "warning"), ("CK513", f"{KEPT}.w_kc", "0", "error")],
    ),
    "a refused update": (
        [Reload(RESUMED), Reload("updating from disk again", refused="no loader")],
        [("CK512", None, None, "error")],
    ),
    "an update that was not tried": (
        [Reload(RESUMED), Reload("updating from disk again", refused="no loader", tried=False)],
        [("CK512", None, None, "warning")],
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_reloads_left_is_named_with_its_rank(name, verdict):
    reloads, expected = FOUND[name]
    found = verdict(reloaded(*reloads)).findings
    assert {(one.code, one.tensor, one.rank, one.severity) for one in found} == {*expected}
    assert len(found) == len(expected)


def test_an_engine_that_died_keeps_what_was_found_and_is_inconclusive(verdict):
    report = replace(reloaded(Reload(UPDATED, changed=["0 head"])), complete=False)
    outcome = verdict(report, why="while updating from disk: an error")
    assert failed(outcome) == {"CK512"}
    reason = text_with("while updating from disk: an error")
    assert {one.code: one.reason for one in outcome.checks if one.reason} == {"CK512": reason, "CK513": reason}


def test_an_engine_without_a_report_is_inconclusive(verdict):
    outcome = verdict(None, why="the engine failed")
    assert (outcome.findings, outcome.reasons) == ([], ["CK511, CK512, CK513, CK601: the engine failed"])


def test_a_draft_model_that_changed_is_named_and_the_rest_said_once(verdict):
    both = ["0 model.layers.3.w2"]
    plain = reloaded(Reload(UPDATED, changed=both, unequal=["head"]), Reload(RESUMED))
    changed = ["0 draft.model.eh_proj.weight", "1 draft.model.decoder.w2", *both]
    unequal = ["head", "model.eh_proj.weight", "model.hnorm.weight"]
    draft = reloaded(
        Reload(UPDATED, changed=changed, unequal=unequal), Reload(RESUMED, changed=["0 draft.model.cache"])
    )
    outcome = verdict(plain, draft=EngineRun(replace(draft, passes={}, draft_held=1)))
    assert {(one.code, one.tensor, one.rank): one.actual.count("draft") for one in outcome.findings} == {
        ("CK512", "model.layers.3.w2", "0"): 0,
        ("CK512", "head", None): 0,
        ("CK512", "draft.model.eh_proj.weight", "0"): 1,
        ("CK512", "draft.model.decoder.w2", "1"): 1,
        ("CK512", "model.hnorm.weight", None): 0,
        ("CK513", "draft.model.cache", "0"): 1,
    }
    (held,) = outcome.facts["SGLang engine, with speculative decoding"]
    assert held == text_with("1 draft")


def test_a_draft_engine_that_does_not_start_is_inconclusive_in_its_words(verdict):
    outcome = verdict(sound(), draft=EngineRun(None, failed="no such draft"))
    assert (outcome.findings, outcome.reasons) == ([], ["CK512, CK513: with speculative decoding: no such draft"])
    assert [one.status for one in outcome.checks] == ["passed", "skipped", "skipped", "passed"]


def test_a_refusal_of_both_engines_is_said_once(verdict):
    report = reloaded(*FOUND["an update that was not tried"][0])
    found = verdict(report, draft=EngineRun(report)).findings
    assert [(one.code, one.severity) for one in found] == [("CK512", "warning")]


SEVERAL = Judged([-1.0, -2.0], [[7, 1], [8, 1]], judged(-1.0, -2.0).top)
SAME = judged(-1.0, -2.0)


@pytest.mark.parametrize(
    ("report", "reference", "code", "actual"),
    [
        (answered(judged(math.nan, -1.0), judged(-1.0, -1.0)), EXACT, "CK511", "1"),
        (answered(judged(-1.2, -2.2), judged(-1.2, -2.2)), EXACT, "CK601", "9.5"),
        # As SGLang's experts with zero points in groups of 32: a kernel reads memory that nothing wrote.
        (answered(SAME, judged(-1.1, -2.1)), EXACT, "CK601", "5.0"),
        # INT4 kernels that add up in another order each time stay within the noise.
        (answered(SAME, judged(-1.05, -2.05)), EXACT, None, ""),
        (sound(), Reference("bfloat16", [SEVERAL], [SEVERAL]), "CK601", "token position"),
    ],
    ids=["no numbers", "beyond the noise", "contradicts itself", "within the noise", "one best token"],
)
def test_log_probabilities_beyond_the_noise_fail(report, reference, code, actual, verdict):
    outcome = verdict(report, reference)
    assert failed(outcome) == ({code} if code else set())
    assert [one.actual for one in outcome.findings] == [text_with(actual)] * (code is not None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.sglang
def test_without_a_gpu_the_command_line_is_inconclusive(releases):
    run = CliRunner().invoke(cli, ["verify", str(releases("qwen3_moe")), "--engine", "--logits", "--json"])
    report = json.loads(run.stdout)
    assert (run.exit_code, report["status"]) == (2, "inconclusive")
    skipped = {check["code"]: check["reason"] for check in report["checks"] if check["status"] == "skipped"}
    assert skipped.keys() == {"CK511", "CK601"}
    assert all("CUDA" in reason or "GPU" in reason for reason in skipped.values())


def test_a_word_that_asks_for_no_witness_is_refused(releases):
    with pytest.raises(CkptkitError, match="release_resume"):
        verify(releases("qwen3_moe"), against=frozenset({"release_resume"}))


class Ended:
    """Stands for a process that ends with a traceback in its log; keeps the job that it was given."""

    def __init__(self, log):
        self._log = log
        self.job: dict[str, Any] = {}

    def __call__(self, root, *_, **__):
        self.job = json.loads((root / "job-0.json").read_text())
        (root / "log-0").write_text(self._log)
        return {0: "exit code 1"}


# A width of 576 in groups of 32, in the words of SGLang's `gptq_marlin.cuh`.
NO_TILE = (
    "[12:00:00] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "/site/sglang/srt/layers/quantization/marlin_utils.py", line 520, in apply_gptq_marlin_linear\n    out()\n'
    "RuntimeError: Invalid thread config: thread_m_blocks = 1, thread_k = -1, thread_n = -1, num_threads = -1 for MKN "
    "= [48, 576, 960] and num_bits = 4\n\n[12:00:01] SIGQUIT received.\n"
)


def served(monkeypatch, path, *asked):
    """CK511 to CK513 where an engine ends with this log."""
    ended = Ended(NO_TILE)
    monkeypatch.setattr(engine_run, "_sizes", lambda engine, subject: ONE_RANK)
    monkeypatch.setattr(runner, "run_ranks", ended)
    checks = [one for one in all_checks() if one.code in CODES[:3] and set(one.needs) <= {*asked}]
    return run_checks(Subject(path, options=VerifyOptions(against=frozenset(asked))), checks), ended


def test_an_engine_that_ends_is_no_verdict(monkeypatch, releases):
    outcome, _ = served(monkeypatch, releases("qwen3_moe"), "engine", "update")
    assert (outcome.findings, {one.status for one in outcome.checks}) == ([], {"skipped"})
    assert "[48, 576, 960]" in outcome.reasons[0]


def test_an_update_that_sglang_cannot_take_is_not_tried(monkeypatch, releases, tmp_path):
    """INT4 layers other than routed experts are repacked once and for all."""
    asked = ("engine", "update", "release-resume")
    quantize(releases("qwen3_moe"), tmp_path / "all", QuantScheme(32, "qmax7"))
    quantize(releases("qwen3_moe"), tmp_path / "experts", QuantScheme(32, "qmax7", (r"re:.*\.self_attn\..*",)))
    outcome, ended = served(monkeypatch, tmp_path / "all", *asked)
    reason = next(one.reason for one in outcome.checks if one.code == "CK512")
    assert "self_attn.q_proj.weight_packed" in str(reason)
    assert (ended.job["update"], ended.job["release_resume"]) == (False, False)
    _, ended = served(monkeypatch, tmp_path / "experts", *asked)
    assert (ended.job["update"], ended.job["release_resume"]) == (True, True)
