"""Every test model of every family into real SGLang: clean, or what SGLang itself says or leaves out."""

from pathlib import Path

import pytest
from support import models
from support.messages import text_with
from support.nightly import collected
from support.sglang_families import (
    CLEAN,
    DRAFTS,
    LEFT_OUT,
    NO_DRAFT,
    SAID,
    STRICT,
    holds_draft,
    names_faults,
    of_a_kind,
    unread,
)
from support.sglang_runs import LOST_OF_DRAFT, Case, clean, draft_of, refusal, reported

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cases(request, tmp_path_factory):
    root, needed = tmp_path_factory.mktemp("models"), collected(request, "name")
    for name in needed:
        models.save(name, root / name)
    broken = {f"{name} broken": Case(root / name, alter="lost_and_exchanged") for name in CLEAN if name in needed}
    return {name: Case(root / name) for name in needed} | broken


@pytest.mark.parametrize("name", of_a_kind(CLEAN))
def test_every_tensor_is_where_sglang_keeps_it(name, cases, runs):
    report = clean(runs[name])
    tensors = models.tensors(Path(cases[name].checkpoint))
    # Bounds in Gemma 4's audio tower have no axis.
    left = unread(name, tensors, report) | {one for one, tensor in tensors.items() if not tensor.dim()}
    assert report.loaded_names == len(tensors)
    assert report.bytes == sum(tensor.nbytes for one, tensor in tensors.items() if one not in left)
    draft = draft_of(runs[name])
    assert (draft and draft.model) == DRAFTS.get(name)
    if draft:
        holds_draft(draft, tensors)
        assert draft.loaded_names == len(draft.equal)
    assert refusal(runs[name]) == ""
    assert NO_DRAFT.get(name, "None") in str(runs[name].failure)  # why no draft model is built


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_sglangs_class_leaves_out_is_named(name, runs):
    report = reported(runs[name])
    tensor, what, count = LEFT_OUT[name]
    assert {one.tensor: one.what for one in report.dropped}[tensor] == text_with(what)
    assert (len(report.dropped), report.differing) == (count, ())


@pytest.mark.parametrize("name", of_a_kind(SAID))
def test_what_sglang_refuses_is_quoted(name, runs):
    run = runs[name]
    assert run.report is None
    assert SAID[name] in str(run.failure)


@pytest.mark.parametrize("name", of_a_kind(CLEAN))
def test_lost_and_exchanged_tensors_are_named(name, cases, runs):
    run, tensors = runs[f"{name} broken"], models.tensors(cases[name].checkpoint)
    if name in STRICT:
        assert run.report is None
        assert "Some parameters are not loaded: {'model.layers.5.input_layerno" in refusal(run)
        return
    names_faults(reported(run), tensors)
    draft = draft_of(run)
    assert (draft is not None) == (name in DRAFTS)
    if draft:
        names_faults(draft, tensors, LOST_OF_DRAFT)
        assert len(draft.dropped) == (
            2 if name in ("qwen3_5", "qwen3_5_moe_text") else 3
        )  # the latter has fused experts
        params = {one.param for one in draft.unwritten}
        for ends in (
            ("e_proj.weight", "eh_proj.weight", "fc.weight"),
            ("input_layernorm.weight", "layers.0.norm.weight"),
        ):
            assert any(param.endswith(ends) for param in params), params
