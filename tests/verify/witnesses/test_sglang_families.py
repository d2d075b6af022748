"""Every test model of every family into real SGLang: clean, or what SGLang itself says or leaves out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from families import OF_A_KIND
from support import models
from support.nightly import collected, daily
from support.sglang_families import (
    CLEAN,
    COMPUTED,
    DRAFTS,
    EXPERT,
    EXPERT_OF_DRAFT,
    LEFT_OUT,
    NO_DRAFT,
    OF_DRAFT,
    SAID,
    STRICT,
)
from support.sglang_runs import CUT, LOST, LOST_OF_DRAFT, Case, run_cases

from verify.witnesses.loading.run import LoadRun

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(900),
]
Cases = Mapping[str, Case]
Runs = Mapping[str, LoadRun]
# Test models whose experts SGLang loads by its class for all of them, and how a down projection's name ends.
ROUTED = [
    name
    for name in CLEAN
    if "moe" in name or name.startswith(("deepseek", "kimi", "moonlight", "qwen3_next", "minimax"))
    if name != "deepseek_v4"  # SGLang has been given all of it before it loads any
]
COLLECTED = (
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "glm_moe_dsa",
    "glm_moe_dsa-shared",
    "moonlight",
    "kimi_k2",
    "gpt_oss",
    "gpt_oss-v4",
    "step3p7",
)
DOWN = re.compile(r".*\.(experts\.(\d+\.(down_proj|w2)\.weight|down_proj)|block_sparse_moe\.output_linear\.weight)")


def of_a_kind(names: Iterable[str]) -> list[Any]:
    return daily(names, [name for name in names if name in OF_A_KIND])


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    root, needed = tmp_path_factory.mktemp("models"), collected(request, "name")
    for name in needed:
        models.save(name, root / name)
    altered = {"lost_and_exchanged": CLEAN, "cut": CLEAN, "half_written": ROUTED}
    return {name: Case(root / name) for name in needed} | {
        f"{name} {alter}": Case(root / name, alter=alter)
        for alter, names in altered.items()
        for name in names
        if name in needed
    }


@pytest.fixture(scope="module")
def runs(cases: Mapping[str, Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadRun]:
    return run_cases(cases, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", of_a_kind(CLEAN))
def test_every_tensor_is_where_sglang_keeps_it(name: str, cases: Cases, runs: Runs) -> None:
    report = runs[name].report
    assert report is not None, runs[name]
    assert (report.unwritten, report.dropped, report.differing, report.routers) == ((), (), (), ())
    assert report.computed == (COMPUTED.get(name, ()) if name == "minimax_m3_vl" else ())
    tensors = models.tensors(Path(cases[name].checkpoint))
    unread = models.UNREAD.get(name, ())
    left = {one for one in tensors if one in report.draft or one.startswith(unread) or "rotary_emb.inv_freq" in one}
    left |= {one for one, tensor in tensors.items() if not tensor.dim()}  # bounds in Gemma 4's audio tower
    assert report.loaded_names == len(tensors)
    assert report.bytes == sum(tensor.nbytes for one, tensor in tensors.items() if one not in left)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_sglangs_class_leaves_out_is_named(name: str, runs: Runs) -> None:
    report = runs[name].report
    assert report is not None, runs[name]
    tensor, what, count = LEFT_OUT[name]
    assert {one.tensor: one.what for one in report.dropped}[tensor] == what
    assert (len(report.dropped), report.differing) == (count, ())


@pytest.mark.parametrize("name", of_a_kind(SAID))
def test_what_sglang_refuses_is_quoted(name: str, runs: Runs) -> None:
    run = runs[name]
    assert run.report is None
    assert SAID[name] in f"{run.crash}{run.unable}"


@pytest.mark.parametrize("name", of_a_kind(STRICT))
def test_a_class_that_stops_at_a_lost_tensor_is_quoted(name: str, runs: Runs) -> None:
    run = runs[f"{name} lost_and_exchanged"]
    assert run.report is None
    assert "Some parameters are not loaded: {'model.layers.5.input_layerno" in str(run.crash)


@pytest.mark.parametrize("name", of_a_kind([name for name in CLEAN if name not in STRICT]))
def test_lost_and_exchanged_tensors_are_named(name: str, cases: Cases, runs: Runs) -> None:
    """A norm, up of an expert and all of another are missing; two experts of another layer have each other's names."""
    report = runs[f"{name} lost_and_exchanged"].report
    assert report is not None, runs[f"{name} lost_and_exchanged"]
    tensors = models.tensors(cases[name].checkpoint)
    missing = {one for one in tensors if LOST.fullmatch(one)}
    assert {one.tensor for one in report.unwritten} == missing
    assert {one.tensor for one in report.dropped} == missing
    assert {one.tensor for one in report.differing} == {one for one in tensors if EXPERT.search(one)}


@pytest.mark.parametrize("name", of_a_kind([name for name in CLEAN if name in DRAFTS]))
def test_every_tensor_of_a_draft_layer_is_in_sglangs_draft_model(name: str, cases: Cases, runs: Runs) -> None:
    report = runs[name].draft
    assert report is not None, runs[name]
    assert report.model == DRAFTS[name]
    assert (report.unwritten, report.dropped, report.differing, report.routers, report.computed) == ((), (), (), (), ())
    tensors = models.tensors(cases[name].checkpoint)
    assert report.equal == {one: tensor.nbytes for one, tensor in tensors.items() if OF_DRAFT.fullmatch(one)}
    assert report.loaded_names == len(report.equal)


@pytest.mark.parametrize("name", of_a_kind(DRAFTS))
def test_lost_and_exchanged_tensors_of_a_draft_layer_are_named(name: str, cases: Cases, runs: Runs) -> None:
    """The projection of both inputs, a norm and up of one expert are missing; two experts have each other's names."""
    report = runs[f"{name} lost_and_exchanged"].draft
    assert report is not None, runs[f"{name} lost_and_exchanged"]
    tensors = models.tensors(cases[name].checkpoint)
    missing = {one for one in tensors if LOST_OF_DRAFT.fullmatch(one)}
    assert len(missing) == (2 if name in ("qwen3_5", "qwen3_5_moe_text") else 3)  # the latter's experts are fused
    assert {one.tensor for one in report.unwritten} == missing
    assert {one.tensor for one in report.dropped} == missing
    assert {one.tensor for one in report.differing} == {one for one in tensors if EXPERT_OF_DRAFT.fullmatch(one)}
    params = {one.param for one in report.unwritten}
    assert any(param.endswith(("e_proj.weight", "eh_proj.weight", "fc.weight")) for param in params), params
    assert any(param.endswith(("input_layernorm.weight", "layers.0.norm.weight")) for param in params), params


@pytest.mark.parametrize("name", of_a_kind(NO_DRAFT))
def test_why_no_draft_model_is_built_is_said(name: str, runs: Runs) -> None:
    assert (runs[name].draft, runs[name].draft_crash) == (None, None)
    assert NO_DRAFT[name] in str(runs[name].draft_error)


@pytest.mark.parametrize("name", of_a_kind([name for name in CLEAN if name not in DRAFTS and name not in NO_DRAFT]))
def test_models_without_draft_layers_have_no_draft_model(name: str, runs: Runs) -> None:
    assert (runs[name].draft, runs[name].draft_error) == (None, None)


@pytest.mark.parametrize("name", of_a_kind(CLEAN))
def test_a_matrix_with_half_of_its_rows_is_named_with_what_sglang_says(name: str, cases: Cases, runs: Runs) -> None:
    """Up of an expert, or the output of attention. No loader of SGLang takes it; some collect all tensors first."""
    crash = str(runs[f"{name} cut"].crash)
    cut = {one: tensor.shape for one, tensor in models.tensors(cases[name].checkpoint).items() if CUT.fullmatch(one)}
    if name in COLLECTED:
        assert crash.endswith("by then it had been given every tensor")
    else:
        last = crash.rpartition("the last tensor it was given: ")[2]
        cut = {last: cut[last]}
    assert any(
        f"loaded_weight.shape=torch.Size([{rows // 2}, {columns}])" in crash or f"dimension size ({rows // 2})" in crash
        for rows, columns in cut.values()
    )


@pytest.mark.parametrize("name", of_a_kind(ROUTED))
def test_the_half_of_each_expert_that_a_loader_leaves_out_is_named(name: str, cases: Cases, runs: Runs) -> None:
    report = runs[f"{name} half_written"].report
    assert report is not None, runs[f"{name} half_written"]
    tensors = models.tensors(cases[name].checkpoint)
    down = {one: tensor.numel() for one, tensor in tensors.items() if DOWN.fullmatch(one) and one not in report.draft}
    assert {one.tensor: one.what for one in report.dropped} == {
        one: f"only {size // 2} of its {size} elements were written" for one, size in down.items()
    }
    params = {re.sub(r"\.(experts|output_linear)\..*", ".experts.w2_weight", one) for one in down}
    if name != "kimi_k3":
        params = {one.replace("language_model.", "") for one in params}
    if name in ("minimax_m3_vl", "kimi_k3"):
        params = {one.replace("block_sparse_moe", "mlp") for one in params}
    assert {one.param for one in report.unwritten} == params
    assert report.differing == ()
