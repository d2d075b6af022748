"""`--trainer-loader`: Megatron-LM's own `load_checkpoint` in place of megatron-core's loader."""

from importlib.util import find_spec

import pytest
import torch
from support import models
from support.megatron_layouts import CHECKS, judge
from support.messages import text_with

from ckptkit.verify.core.check import CheckResult
from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.options import VerifyOptions
from ckptkit.verify.witnesses.megatron.run import run_megatron
from ckptkit.verify.witnesses.process import interpreter

TRACKER = "latest_checkpointed_iteration.txt"
needs_loader = pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.training") is None,
    reason="megatron.training is not installed: it comes with megatron-core since 0.19",
)


@pytest.fixture
def root(fresh_megatron):
    return fresh_megatron("qwen2-untied")


def subject_of(path, source=None, *, ranks=(), **sizes):
    return Subject(
        path, source, options=VerifyOptions(**sizes, ranks=ranks, trainer_loader=True, against=frozenset({"megatron"}))
    )


def found(path):
    """What CK401 finds; the other checks cannot say anything where no rank loaded."""
    return list(CHECKS["CK401"](subject_of(path), CheckResult("", "")))


@needs_loader
@pytest.mark.usefixtures("served")
def test_two_ranks_hold_their_slices(converted, releases):
    findings, results = judge(subject_of(converted("qwen2-untied"), releases("qwen2-untied"), tp=2))
    assert findings == []
    (fact,) = results["CK401"].facts["megatron"]
    assert "TP2 PP1, 2 rank(s), Megatron-LM's load_checkpoint, gloo on the CPU" in fact
    # 12 layers of 7 tensors, embedding, output layer and last norm, on each of the ranks.
    assert results["CK402"].tensors_compared == 2 * (12 * 7 + 3)
    assert results["CK404"].tensors_compared == 12 * 7 + 3


@needs_loader
@pytest.mark.usefixtures("served")
def test_stored_arguments_that_differ_are_refused_in_megatrons_words(root):
    file = root / "release" / "common.pt"
    common = torch.load(file, weights_only=False)
    common["args"].num_attention_heads = 5
    torch.save(common, file)
    (finding,) = found(root)
    assert finding.actual == text_with("num_attention_heads (5) (10)")


@needs_loader
@pytest.mark.usefixtures("served")
def test_key_that_megatron_asks_for_is_named(root):
    name = "decoder.layers.3.mlp.linear_fc2.weight"
    models.edit_metadata(root / "release", lambda metadata: metadata.state_dict_metadata.pop(name))
    (finding,) = found(root)
    assert name in finding.actual


@needs_loader
@pytest.mark.parametrize(("said", "words"), [(None, "Megatron-LM"), ("20", "20 Megatron-LM iter_0000020")])
def test_tracker_that_does_not_name_the_checkpoint_is_a_finding(root, said, words):
    (root / TRACKER).unlink()
    if said:
        (root / TRACKER).write_text(said)
    (finding,) = found(root / "release")
    assert finding.actual == text_with(words)


def test_without_the_training_package_nothing_is_said(converted, monkeypatch):
    missing = "megatron.training"
    monkeypatch.setattr(interpreter, "find_spec", lambda name: None if name == missing else find_spec("json"))
    with pytest.raises(CannotCheck, match="load_checkpoint.*megatron-core"):
        run_megatron(subject_of(converted("qwen2-untied")))


@needs_loader
@pytest.mark.parametrize(
    ("how", "words"), [({"pp": 2, "vpp": 2}, "TP1 PP2 VPP2"), ({"tp": 2, "ranks": (0,)}, "--ranks")]
)
def test_layout_that_the_loader_is_not_run_in_is_no_verdict(converted, how, words):
    with pytest.raises(CannotCheck, match=words):
        run_megatron(subject_of(converted("qwen2-untied"), **how))
