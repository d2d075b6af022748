"""What an engine writes and which experts it chooses: figures worked out by hand, and the checks' verdicts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support import models
from support.check_examples import hold_example
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM

from verify.check import Outcome, all_checks, run_checks
from verify.checks.witnesses import behaviour
from verify.evidence.subject import Subject
from verify.options import VerifyOptions
from verify.skip import Unable
from verify.witnesses.live.job import AGAIN, FIRST, EngineReport
from verify.witnesses.live.run import EngineRun
from verify.witnesses.process.codec import load, save
from verify.witnesses.process.exit_report import PhaseLog
from verify.witnesses.reference.distance import rerouted
from verify.witnesses.reference.job import Answers, Continuation, Judged, Reference, ReferenceJob
from verify.witnesses.reference.process import run as run_job
from verify.witnesses.reference.text import figures, openings_of, tokenizer_of

OPENING = [5, 9, 2, 40]
FINITE = Judged([-1.0, -2.0], [[7, 1], [8, 1]], [[-0.7, -1.4]] * 2)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("behaviour") / "moe"
    models.save("qwen3_moe", path)
    return path


@pytest.fixture(scope="module")
def answers(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    root = tmp_path_factory.mktemp("reference")
    job = ReferenceJob(
        str(release),
        str(root / "report"),
        prompts=[OPENING],
        top_ids=[[[1], [1], [1]]],
        openings=[OPENING],
        written=[[11, 30]],
        length=6,
        routing=True,
    )
    with PhaseLog(root / "report") as phases:
        return run_job(job, phases)


def test_the_reference_writes_scores_and_routes_as_transformers_does(release: Path, answers: Reference) -> None:
    model = AutoModelForCausalLM.from_pretrained(release, dtype=torch.float32)
    found = answers.exact
    tokens = list(OPENING)
    for token, logprob in zip(found.written[0].ids, found.written[0].logprobs, strict=True):
        with torch.no_grad():
            last = model(input_ids=torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        assert token == int(last.argmax())
        assert logprob == pytest.approx(float(last.max()), abs=1e-5)
        tokens.append(token)
    assert len(found.written[0].ids) == 6 or found.written[0].ids[-1] == model.config.eos_token_id
    with torch.no_grad():
        output = model(input_ids=torch.tensor([[*OPENING, 11, 30]]), output_router_logits=True)
    logprobs = output.logits[0].log_softmax(-1)
    assert found.scored[0] == pytest.approx([float(logprobs[3, 11]), float(logprobs[4, 30])], abs=1e-5)
    for layer, logits in enumerate(output.router_logits):
        for token in range(4):
            best = logits[token].topk(model.config.num_experts_per_tok).indices.tolist()
            assert set(found.routed[0][token][layer]) == set(best)


def test_figures_of_a_text_are_as_counted_by_hand() -> None:
    once = Continuation([1, 2, 3, 4, 5, 6], [-1.0] * 6)
    again = Continuation([1, 2, 1, 2, 1, 2], [-2.0] * 6)  # of its runs 1212, 2121, 1212 the last came before
    found = figures([once, again])
    assert (found.loss, found.odd) == (1.5, None)
    assert found.repeated == pytest.approx(1 / 6)
    assert str(found) == "perplexity 4.48, 17% repeated"
    assert math.isnan(figures([]).loss)
    assert str(figures([Continuation([1], [-200.0])])).startswith("perplexity beyond all bounds")


def _tokenizer(root: Path) -> Any:
    words = {"a": 0, "b": 1, "\ufffd": 2, "[UNK]": 3}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))  # noqa: S106 - a token of text
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(root / "tokenizer.json"))
    return tokenizer_of(root)


def test_tokens_that_are_no_text_are_counted_but_for_the_end(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path)
    flat = [-1.0] * 4
    assert figures([Continuation([0, 1, 0, 4], flat)], tokenizer).odd == 0  # it ends with <end>
    assert figures([Continuation([4, 1, 0, 1], flat)], tokenizer).odd == 0.25
    assert figures([Continuation([0, 99, 0, 1], flat)], tokenizer).odd == 0.25
    assert figures([Continuation([0, 2, 0, 1], flat)], tokenizer).odd == 0.25
    assert figures([Continuation([4, 99, 2, 0], flat)], tokenizer).odd == 0.75


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(Unable, match=r"tokenizer\.json is not a tokenizer \(.*\): take it from the release"):
        tokenizer_of(tmp_path)


def test_openings_are_text_where_a_tokenizer_fits_the_model(tmp_path: Path) -> None:
    prompts = [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    tokenizer = _tokenizer(tmp_path)
    assert [len(one) > 0 for one in openings_of(tokenizer, {"vocab_size": 5}, prompts)] == [True] * 4
    assert openings_of(tokenizer, {"vocab_size": 5}, prompts) != prompts[:4]
    assert openings_of(tokenizer, {"text_config": {"vocab_size": 3}}, prompts) == prompts[:4]
    assert openings_of(None, {"vocab_size": 5}, prompts) == prompts[:4]


def test_other_choices_of_experts_are_counted_by_layer() -> None:
    theirs = [[[[], [1, 2], [3, 4]], [[], [1, 2], [3, 4]]]]
    ours = [[[[0, 0], [2, 1], [3, 9]], [[0, 0], [1, 2], [8, 9]]]]
    assert rerouted(ours, theirs) == {1: 0.0, 2: 0.75}


def verdict(
    release: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: Continuation,
    reference: Reference,
    routed: Any = (),
    routed_layers: int = 12,
    source: Path | None = None,
) -> Outcome:
    report = EngineReport(
        "0.5.16", "a GPU", {name: [FINITE] for name in (FIRST, AGAIN)}, written=[written], routed=routed, complete=True
    )
    run = EngineRun(report, [OPENING], None, [OPENING], routed_layers)
    monkeypatch.setattr(behaviour, "run_engine", lambda subject: run)
    monkeypatch.setattr(behaviour, "run_engine_reference", lambda subject: reference)
    checks = [one for one in all_checks() if one.code in ("CK604", "CK605")]
    return run_checks(Subject(release, source, options=VerifyOptions(against=frozenset({"engine", "logits"}))), checks)


CHOICES = [[[[layer % 12, (layer + 1) % 12] for layer in range(12)] for _ in range(50)]]


def reference(score: float, repeated: bool = False, routed: Any = CHOICES) -> Reference:
    ids = [1, 2] * 10 if repeated else list(range(20))
    one = Answers([], routed, [[score] * 20], [Continuation(ids, [score] * 20)])
    return Reference("bfloat16", one, one)


PLAIN = Continuation(list(range(20)), [-1.0] * 20)


def test_a_sound_engine_writes_what_transformers_would(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = verdict(release, monkeypatch, PLAIN, reference(-1.02), CHOICES)
    assert [(one.code, one.status) for one in outcome.checks] == [("CK604", "passed"), ("CK605", "passed")]
    assert outcome.findings == []
    assert outcome.facts["text"][0].startswith("SGLang 0.5.16 writes: perplexity 2.72, 0% repeated")
    assert "no tokenizer.json, so random tokens are continued" in outcome.facts["text"]


@pytest.mark.parametrize("score", [-1.6, -0.4, math.nan])
def test_text_that_transformers_would_not_write_fails(
    score: float, release: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = verdict(release, monkeypatch, PLAIN, reference(score), CHOICES)
    assert [(one.code, one.severity) for one in outcome.findings] == [("CK604", "error")]
    assert outcome.findings[0].actual == f"-1.00 a token by SGLang, {score:.2f} by transformers"
    if not math.isnan(score):
        hold_example("CK604", outcome.findings[0])


def test_text_that_only_the_source_would_not_write_is_a_warning(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantization cost 0.6 nats a token; SGLang computes what the quantized weights say."""
    monkeypatch.setattr(behaviour, "run_source", lambda subject: reference(-1.6))
    outcome = verdict(release, monkeypatch, PLAIN, reference(-1.02), CHOICES, source=release)
    (finding,) = outcome.findings
    assert (finding.code, finding.severity) == ("CK604", "warning")
    assert finding.actual == "-1.00 a token by SGLang, -1.60 by the source"
    assert outcome.facts["text"][1:3] == [
        "transformers gives that text perplexity 2.77 (bfloat16: 2.77)",
        "no tokenizer.json, so random tokens are continued",
    ]
    assert "the source gives it perplexity 4.95" in outcome.facts["text"]


def test_an_engine_that_wrote_nothing_is_inconclusive(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = verdict(release, monkeypatch, Continuation([], []), reference(-1.0), CHOICES)
    assert outcome.reasons == ["CK604: the engine wrote nothing"]


def test_repetition_warns_only_where_the_reference_has_less(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looping = Continuation([1, 2] * 10, [-1.0] * 20)
    (finding,) = verdict(release, monkeypatch, looping, reference(-1.0), CHOICES).findings
    assert (finding.code, finding.severity) == ("CK604", "warning")
    assert "88% repeated" in finding.actual
    assert verdict(release, monkeypatch, looping, reference(-1.0, repeated=True), CHOICES).findings == []


def test_routers_that_choose_other_experts_are_named(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of 10% everywhere: 25% is still noise, 40% is not."""
    noisy = [[[[0, 1] if token % 5 or layer > 3 else [0, 9] for layer in range(12)] for token in range(50)]]
    plain = [[[[0, 1]] * 12] * 50]
    exact, rounded = (reference(-1.0, routed=routed).exact for routed in (plain, noisy))
    choices = Reference("bfloat16", exact, rounded)
    astray = {4: 20, 7: 40, 8: 40}  # layer: tokens of 50 with one other expert of two
    routed = [[[[0, 9] if token < astray.get(layer, 0) else [0, 1] for layer in range(12)] for token in range(50)]]
    outcome = verdict(release, monkeypatch, PLAIN, choices, routed)
    assert [(one.code, one.tensor) for one in outcome.findings] == [("CK605", "model.layers.{4,7..8}.mlp.gate.weight")]
    hold_example("CK605", outcome.findings[0])


def test_an_engine_that_gives_no_choices_is_inconclusive(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = verdict(release, monkeypatch, PLAIN, reference(-1.0), routed_layers=0)
    assert "num_experts_per_tok" in outcome.reasons[0]
    outcome = verdict(release, monkeypatch, PLAIN, reference(-1.0), routed=[])
    assert [one.status for one in outcome.checks] == ["passed", "skipped"]


def test_choices_are_not_asked_of_a_class_that_cannot_tell_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that was asked for is then missing: the rest of --logits is judged."""
    models.save("mixtral", tmp_path / "mixtral")
    monkeypatch.setattr("verify.witnesses.live.run.package_release", lambda package: (0, 5, 16))
    (routing,) = (one for one in all_checks() if one.code == "CK605")
    reason = routing.left_out(
        Subject(tmp_path / "mixtral", options=VerifyOptions(against=frozenset({"engine", "logits"})))
    )
    assert (
        reason == "MixtralForCausalLM has no layer_id in its routers before SGLang 0.5.23, so it cannot report experts"
    )
    monkeypatch.setattr("verify.witnesses.live.run.package_release", lambda package: (0, 5, 23))
    assert (
        routing.left_out(Subject(tmp_path / "mixtral", options=VerifyOptions(against=frozenset({"engine", "logits"}))))
        is None
    )


def test_answers_that_are_no_numbers_leave_behaviour_out(release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Judged([math.nan, -1.0], FINITE.top_ids, FINITE.top)
    report = EngineReport("0.5.16", "a GPU", {FIRST: [broken]}, complete=True)
    monkeypatch.setattr(behaviour, "run_engine", lambda subject: EngineRun(report, [OPENING]))
    checks = [one for one in all_checks() if one.code in ("CK604", "CK605")]
    outcome = run_checks(Subject(release, options=VerifyOptions(against=frozenset({"engine", "logits"}))), checks)
    assert {one.reason for one in outcome.checks} == {"not run because the engine's answers are not numbers (CK511)"}


def test_a_job_of_the_reference_is_read_as_written(tmp_path: Path) -> None:
    job = ReferenceJob("model", "report", [[1, 2]], [[[3]]], [[4]], [[5, 6]], 7, True, streams=["a"])
    save(job, tmp_path / "job")
    assert load(ReferenceJob, tmp_path / "job") == job
