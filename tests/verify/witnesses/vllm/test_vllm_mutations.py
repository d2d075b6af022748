"""Broken checkpoints into real vLLM: dense, with experts, with latent attention; in BF16, INT4 and FP8."""

import re

import pytest
from support import models
from support.nightly import daily
from support.quantized import int4, write
from support.sglang_formats import write_all
from support.sglang_runs import Case, checked, reported
from support.vllm_runs import HALF, LOST, MUTATIONS, run_cases

from ckptkit.verify.witnesses.vllm.facts import VLLM

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

MODELS = ("groups qwen3-untied", "groups qwen3_moe", "groups deepseek_v3", "fp8 glm4_moe")
PLAIN = ("qwen3-untied", "qwen3_moe", "deepseek_v3")
DAILY = ("qwen3_moe", "groups deepseek_v3", "fp8 glm4_moe")
# Models and mutations whose tensors have values of others: which.
EXCHANGED = {
    **{(model, "half an expert"): HALF for model in ("qwen3_moe", "groups deepseek_v3")},
    **{
        (model, "two experts exchanged"): re.compile(r".*layers\.3\.mlp\.experts\.[45]\..*")
        for model in ("qwen3_moe", "groups qwen3_moe", "fp8 glm4_moe")
    },
    **{
        (model, "k and v exchanged"): re.compile(r"model\.layers\.5\.self_attn\.[kv]_proj\..*")
        for model in ("qwen3-untied", "groups qwen3-untied")
    },
}
ROUTERS = ("groups glm4_moe", "groups deepseek_v3")
# A mutation of a model that has nothing of the kind.
NOTHING = "nothing to break"


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in PLAIN:
        models.save(name, root / name)
    return {name: root / name for name in PLAIN} | dict(write_all(root, MODELS))


@pytest.fixture(scope="module")
def runs(paths, tmp_path_factory):
    cases = {f"{model}/{one}": Case(path, alter=one) for model, path in paths.items() for one in MUTATIONS}
    found = run_cases(cases, tmp_path_factory.mktemp("runs"))
    return {(model, one): found[f"{model}/{one}"] for model in paths for one in MUTATIONS}


def used(seen):
    """The tensors that were seen. vLLM keeps shapes of packed weights and never uses them."""
    return {one.tensor for one in seen if not one.tensor.endswith("weight_shape")}


def matching(pattern, path):
    return {one for one in models.tensors(path) if pattern.fullmatch(one) and not one.endswith("weight_shape")}


@pytest.mark.parametrize("mutation", LOST)
@pytest.mark.parametrize("model", daily([*PLAIN, *MODELS], DAILY))
def test_what_is_missing_is_named(model, mutation, paths, runs):
    missing = matching(LOST[mutation], paths[model])
    if not missing:
        pytest.skip(NOTHING)
    report = reported(runs[model, mutation])
    assert used(report.unwritten) == missing
    assert used(report.dropped) == missing
    assert {one.tensor for one in report.routers} == {one for one in missing if one.endswith("mlp.gate.weight")}
    fused = {one.param for one in report.unwritten if ".experts." in one.tensor}
    assert all(".experts.routed_experts.w" in one for one in fused)


@pytest.mark.parametrize(("model", "mutation"), EXCHANGED)
def test_what_has_the_values_of_others_is_named(model, mutation, paths, runs):
    """vLLM copies what fits of half an expert, silently."""
    report = reported(runs[model, mutation])
    assert used(report.differing) == matching(EXCHANGED[model, mutation], paths[model])
    half = report.differing if mutation == "half an expert" else ()
    assert {one.param for one in report.unwritten} == {one.param for one in half}


def with_packed_routers(source, target):
    def edit(config):
        content = config["quantization_config"]
        ignore = [one for one in content["ignore"] if "gate(" not in one]
        assert len(ignore) == len(content["ignore"]) - 1
        return config | {"quantization_config": content | {"ignore": ignore}}

    quantizer = int4(strategy="group", group_size=32, symmetric=True)
    write(source, target, lambda name: name.endswith(".mlp.gate.weight"), quantizer, edit)
    return target


@pytest.fixture(scope="module")
def quantized_routers(tmp_path_factory):
    root = tmp_path_factory.mktemp("routers")
    made = dict(write_all(root, [*ROUTERS, "fp8 qwen3_moe"]))
    cases = {name: Case(with_packed_routers(made[name], root / f"{name} packed")) for name in ROUTERS}
    cases["fp8 qwen3_moe"] = Case(made["fp8 qwen3_moe"])
    runs = run_cases(cases, tmp_path_factory.mktemp("runs"))
    return {name: (case, runs[name]) for name, case in cases.items()}


@pytest.mark.parametrize("model", ROUTERS)
def test_a_packed_router_that_vllm_builds_unquantized_is_named(model, quantized_routers):
    results, findings, _ = checked(*quantized_routers[model], VLLM)
    assert results["CK521"].status == "failed"
    (stopped,) = (one.actual for one in findings if one.code == "CK521")
    assert re.search(r"it was given: model\.layers\.\d\.mlp\.gate\.weight_packed", stopped)


def test_a_router_that_vllm_builds_in_fp8_does_not_stop_the_check_of_routers(quantized_routers):
    """Its BF16 weight is rounded into FP8, and the scale is never written. That of dead routers ends."""
    results, findings, _ = checked(*quantized_routers["fp8 qwen3_moe"], VLLM)
    assert (results["CK522"].status, results["CK525"].status) == ("failed", "passed")
    assert any("mlp.gate.weight_scale_inv" in f"{one.tensor} {one.actual}" for one in findings if one.code == "CK522")


def test_findings_name_both_names(paths, runs):
    results, findings, _ = checked(Case(paths["qwen3_moe"]), runs["qwen3_moe", "q of q, k and v"], VLLM)
    assert results["CK522"].status == results["CK523"].status == "failed"
    (unwritten,) = (one for one in findings if one.code == "CK522")
    assert unwritten.tensor == "model.layers.5.self_attn.q_proj.weight"
    assert "at model.layers.5.self_attn.qkv_proj.weight in vLLM" in unwritten.actual
