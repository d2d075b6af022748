"""Broken checkpoints into real vLLM: dense, with experts, with latent attention; in BF16, INT4 and FP8.

Each tensor that is missing is named by its HF name and by vLLM's parameter, whether or not vLLM says anything itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from support import models
from support.sglang_formats import write_all
from support.sglang_runs import Case, checked
from support.vllm_runs import HALF, LOST, MUTATIONS, found_by_vllm, run_cases
from torch import Tensor

from verify.witnesses.loading.job import Observation
from verify.witnesses.loading.run import LoadRun
from verify.witnesses.vllm.facts import VLLM

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

MODELS = ("groups qwen3-untied", "groups qwen3_moe", "groups deepseek_v3", "fp8 glm4_moe")
PLAIN = ("qwen3-untied", "qwen3_moe", "deepseek_v3")
# A mutation of a model that has nothing of the kind.
NOTHING = "nothing to break"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in PLAIN:
        models.save(name, root / name)
    return {name: root / name for name in PLAIN} | dict(write_all(root, MODELS))


@pytest.fixture(scope="module")
def runs(paths: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], LoadRun]:
    cases = {f"{model}/{one}": Case(path, alter=one) for model, path in paths.items() for one in MUTATIONS}
    found = run_cases(cases, tmp_path_factory.mktemp("runs"))
    return {(model, one): found[f"{model}/{one}"] for model in paths for one in MUTATIONS}


def used(seen: Iterable[Observation]) -> set[str]:
    """The tensors that were seen. vLLM keeps shapes of packed weights and never uses them."""
    return {one.tensor for one in seen if not one.tensor.endswith("weight_shape")}


def lost(mutation: str, tensors: Mapping[str, Tensor]) -> set[str]:
    """The tensors that are not given; not those that vLLM never uses."""
    return {one for one in tensors if LOST[mutation].fullmatch(one) and not one.endswith("weight_shape")}


@pytest.mark.parametrize("mutation", LOST)
@pytest.mark.parametrize("model", [*PLAIN, *MODELS])
def test_what_is_missing_is_named(
    model: str, mutation: str, paths: Mapping[str, Path], runs: Mapping[tuple[str, str], LoadRun]
) -> None:
    missing = lost(mutation, models.tensors(paths[model]))
    if not missing:
        pytest.skip(NOTHING)
    report = runs[model, mutation].report
    assert report is not None, runs[model, mutation]
    assert used(report.unwritten) == missing
    assert used(report.dropped) == missing
    assert {one.tensor for one in report.routers} == {one for one in missing if one.endswith("mlp.gate.weight")}
    fused = {one.param for one in report.unwritten if ".experts." in one.tensor}
    assert all(".experts.routed_experts.w" in one for one in fused)


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3", "groups qwen3_moe", "groups deepseek_v3"])
def test_half_an_expert_is_named(
    model: str, paths: Mapping[str, Path], runs: Mapping[tuple[str, str], LoadRun]
) -> None:
    """vLLM copies what fits, silently."""
    (half,) = (one for one in models.tensors(paths[model]) if HALF.fullmatch(one))
    run = runs[model, "half an expert"]
    assert run.report is not None, run
    assert {one.tensor for one in run.report.differing} == {half}
    assert {one.param for one in run.report.unwritten} == {run.report.differing[0].param}
    assert not found_by_vllm(run)


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3", "groups qwen3_moe", "fp8 glm4_moe"])
def test_exchanged_experts_are_named(
    model: str, paths: Mapping[str, Path], runs: Mapping[tuple[str, str], LoadRun]
) -> None:
    run = runs[model, "two experts exchanged"]
    assert run.report is not None, run
    exchanged = {
        one
        for one in models.tensors(paths[model])
        if ("layers.3.mlp.experts.4." in one or "layers.3.mlp.experts.5." in one) and not one.endswith("weight_shape")
    }
    assert {one.tensor for one in run.report.differing} == exchanged
    assert not found_by_vllm(run)


@pytest.mark.parametrize("model", ["qwen3-untied", "groups qwen3-untied"])
def test_exchanged_keys_and_values_are_named(model: str, runs: Mapping[tuple[str, str], LoadRun]) -> None:
    run = runs[model, "k and v exchanged"]
    assert run.report is not None, run
    modules = {one.tensor.rpartition(".")[0] for one in run.report.differing}
    assert modules == {f"model.layers.5.self_attn.{one}_proj" for one in "kv"}
    assert not found_by_vllm(run)


def test_what_vllm_says_itself_of_missing_tensors(
    paths: Mapping[str, Path], runs: Mapping[tuple[str, str], LoadRun]
) -> None:
    """Its check of BF16 sees norms and no other parameter; in INT4 and FP8 it does not run."""
    tensors = {model: models.tensors(path) for model, path in paths.items()}
    told = {
        (model, mutation)
        for (model, mutation), run in runs.items()
        if mutation in LOST and lost(mutation, tensors[model]) and found_by_vllm(run)
    }
    assert told == {(model, mutation) for model in PLAIN for mutation in ("a norm", "a layer")}


def test_findings_name_both_names(paths: Mapping[str, Path], runs: Mapping[tuple[str, str], LoadRun]) -> None:
    path = paths["qwen3_moe"]
    results, findings, _ = checked(Case(path), runs["qwen3_moe", "q of q, k and v"], VLLM)
    assert results["CK522"].status == results["CK523"].status == "failed"
    (unwritten,) = (one for one in findings if one.code == "CK522")
    assert unwritten.tensor == "model.layers.5.self_attn.q_proj.weight"
    assert "at model.layers.5.self_attn.qkv_proj.weight in vLLM" in unwritten.actual
