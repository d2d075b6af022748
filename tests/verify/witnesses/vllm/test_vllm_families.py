"""Every test model of every family into real vLLM: clean, or what vLLM itself says or leaves out."""

import pytest
from support import models
from support.messages import text_with
from support.nightly import collected
from support.sglang_families import holds_draft, names_faults, of_a_kind, unread
from support.sglang_runs import LOST_OF_DRAFT, Case, clean, draft_of, reported
from support.vllm_families import CLEAN, DRAFT_REFUSED, DRAFTS, LEFT_OUT, SAID
from support.vllm_runs import run_cases

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def root(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in collected(request, "name"):
        models.save(name, root / name)
    return root


@pytest.fixture(scope="module")
def runs(root, tmp_path_factory):
    names = sorted(path.name for path in root.iterdir())
    broken = {f"{name} broken": Case(root / name, alter="lost_and_exchanged") for name in names if name in CLEAN}
    return run_cases({name: Case(root / name) for name in names} | broken, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", of_a_kind(CLEAN))
def test_every_tensor_is_where_vllm_keeps_it(name, root, runs):
    report = clean(runs[name])
    tensors = models.tensors(root / name)
    left = unread(name, tensors, report)
    assert report.loaded_names == len(tensors)
    assert report.equal == {one: tensor.nbytes for one, tensor in tensors.items() if one not in left}
    assert report.device == text_with("H100")
    draft = draft_of(runs[name])
    assert (draft and draft.model) == DRAFTS.get(name)
    if draft:
        holds_draft(draft, tensors)
    else:
        assert DRAFT_REFUSED.get(name, "None") in str(runs[name].failure)


@pytest.mark.parametrize("name", of_a_kind(LEFT_OUT))
def test_what_vllms_class_leaves_out_is_named(name, runs):
    report = reported(runs[name])
    seen = {one.tensor: one.what for one in report.dropped}
    assert seen["model.layers.0.self_attn.k_proj.weight"] == "only 3072 of its 8192 elements were written"
    assert (len(report.dropped), report.differing) == (LEFT_OUT[name], ())


@pytest.mark.parametrize("name", of_a_kind(SAID))
def test_what_vllm_refuses_is_quoted(name, runs):
    assert runs[name].report is None
    assert SAID[name] in str(runs[name].failure)


@pytest.mark.parametrize("name", of_a_kind(CLEAN))
def test_lost_and_exchanged_tensors_are_named(name, root, runs):
    run, tensors = runs[f"{name} broken"], models.tensors(root / name)
    names_faults(reported(run), tensors)
    draft = draft_of(run)
    assert (draft is not None) == (name in DRAFTS)
    if draft:
        names_faults(draft, tensors, LOST_OF_DRAFT)
