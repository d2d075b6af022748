"""Multi-token prediction layers in SGLang's own draft classes: what is wrong is named, and what is not run."""

import re
from dataclasses import replace

import pytest
import torch
from support import models
from support.installed import before
from support.messages import text_with
from support.nightly import daily
from support.sglang_runs import Case, answered, checked, draft_of, int4_config, online_int4, reported, written

from ckptkit.quant.ignore.lint import lint
from ckptkit.quant.ignore.readers import VLLM
from ckptkit.verify.checks.witnesses.loading import KEEP_ROUTER
from ckptkit.verify.run import verify

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

L = "model.layers.12."
QUERY, ROUTER = L + "self_attn.q_proj.weight", L + "mlp.gate.weight"
EMBEDDING, HEAD = L + "embed_tokens.weight", L + "shared_head.head.weight"
COMPRESSED = [L + f"self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa")]
FUSED = "model.decoder.self_attn.fused_qkv_a_proj_with_mqa.weight"
NORM = "mtp.layers.0.self_attn.q_norm.weight"
# What SGLang builds unquantized, by names of the model and of the draft model.
IGNORE = ["lm_head", "model.embed_tokens", KEEP_ROUTER, r"re:.*(shared_experts|shared_head|eh_proj|embed_tokens).*"]


@pytest.fixture(scope="module")
def cases(releases, converted, tmp_path_factory):
    root = tmp_path_factory.mktemp("drafts")
    glm, tensors = releases("glm4_moe-mtp"), models.tensors(releases("glm4_moe-mtp"))
    other = tensors[EMBEDDING].clone()
    other.view(torch.int16)[7, 5] ^= 1
    dead = torch.zeros(12, 128).bfloat16()
    second = {name.replace(".12.", ".13."): tensor.clone() for name, tensor in tensors.items() if name.startswith(L)}
    packed, scheme = online_int4(tensors, IGNORE, 32), int4_config(IGNORE, 32)
    two = written(root, "two", glm, tensors | second, num_nextn_predict_layers=2)

    def lacking(name, *lost, **more):
        kept = {one: tensor for one, tensor in models.tensors(releases(name)).items() if one not in lost}
        return Case(written(root, f"{name} without {lost[0]}", releases(name), kept | more))

    return {
        "megatron": Case(converted("glm4_moe-mtp"), glm),
        "int4": Case(written(root, "int4", glm, packed, quantization_config=scheme)),
        "int4 broken": Case(root / "int4", alter="lost_and_exchanged"),
        "no copies": lacking("glm4_moe-mtp", EMBEDDING, HEAD),
        "query and router": lacking("glm4_moe-mtp", QUERY, **{ROUTER: dead}),
        "norm of qwen": lacking("qwen3_5", NORM),
        "compressed query": lacking("deepseek_v3", COMPRESSED[0]),
        "copy": Case(written(root, "copy", glm, tensors | {EMBEDDING: other})),
        "two layers": Case(two),
        **qwen_int4(root, releases("qwen3_5_moe"), models.tensors(releases("qwen3_5_moe"))),
        # The last one, since it leaves SGLang without draft classes.
        "no class": Case(glm, alter="without_draft_classes"),
    }


# What SGLang builds unquantized of Qwen3.5, besides the draft layer.
QWEN_IGNORE = [
    *("lm_head", "model.language_model.embed_tokens", "re:.*visual.*", r"re:.*\.(linear_attn|shared_expert)\..*"),
    r"re:.*\.mlp\.(gate|shared_expert_gate)(\.weight)?$",
]
PACKED = re.compile(r"model\.language_model\..*\.(self_attn\.[qkvo]|experts\.\d+\.(gate|up|down))_proj\.weight")
FUSED_EXPERTS = "mtp.layers.0.mlp.experts."


def qwen_int4(root, release, tensors):
    """Qwen3.5 with its draft layer in BF16, left out of INT4 by each module's name, as llm-compressor writes lists.

    Then by one entry; then with the draft's experts fused, as the release has them, and each way.
    """
    packed = {name: one for name, one in tensors.items() if PACKED.fullmatch(name)}
    stored = {name: one for name, one in tensors.items() if name not in packed} | online_int4(packed, [], 32)
    names = sorted(
        name.removesuffix(".weight") for name, one in stored.items() if name.startswith("mtp.") and one.dim() > 1
    )
    gate, up, down = (
        torch.stack([stored[f"{FUSED_EXPERTS}{expert}.{part}_proj.weight"] for expert in range(12)])
        for part in ("gate", "up", "down")
    )
    fused = {name: one for name, one in stored.items() if not name.startswith(FUSED_EXPERTS)}
    fused |= {f"{FUSED_EXPERTS}gate_up_proj": torch.cat([gate, up], 1), f"{FUSED_EXPERTS}down_proj": down}
    others = [name for name in names if not name.startswith(FUSED_EXPERTS)] + [r"re:mtp\..*\.qkv_proj$"]

    def case(name, stored, ignore):
        return Case(written(root, name, release, stored, quantization_config=int4_config([*QWEN_IGNORE, *ignore], 32)))

    return {
        "qwen by names": case("qwen-by-names", stored, names),
        "qwen by one entry": case("qwen-by-one-entry", stored, [r"re:mtp\..*"]),
        "fused by names": case("fused-by-names", fused, others),
        "fused by one entry": case("fused-by-one-entry", fused, [r"re:mtp\..*"]),
    }


def draft(run):
    report = draft_of(run)
    assert report is not None, run
    return report


def said(observations):
    return {(one.tensor, one.param) for one in observations}


@pytest.mark.parametrize("name", daily(["megatron", "int4", "no copies"], ["int4"]))
def test_a_sound_draft_model_passes(name, cases, runs, judged):
    results, findings, facts = judged(name)
    assert findings == []
    assert {results[code].status for code in ("CK501", "CK502", "CK503", "CK504", "CK505", "CK508")} == {"passed"}
    tensors = models.tensors(cases[name].source or cases[name].checkpoint)
    own = {one for one in tensors if one.startswith(L)}
    assert set(draft(runs[name]).equal) == {one for one in own if not one.endswith("weight_shape")}
    count = len(own) - 2 * (name == "megatron")
    assert facts["SGLang's draft model"][0] == text_with(f"Glm4MoeForCausalLMNextN {count}")
    assert results["CK502"].tensors_compared == sum(
        report.parameters for report in (runs[name].report, draft_of(runs[name])) if report
    )


def test_a_lost_part_of_a_fused_parameter_and_a_dead_router_are_named(runs, judged):
    param = "model.decoder.self_attn.qkv_proj.weight"
    assert said(draft(runs["query and router"]).unwritten) == {(QUERY, param)}
    _, findings, _ = judged("query and router")
    assert [(one.code, one.tensor) for one in findings] == [("CK502", QUERY), ("CK505", ROUTER)]
    assert findings[0].actual == text_with(f"40960 never {param} draft")


def test_a_lost_tensor_that_sglang_calls_otherwise_is_named(runs):
    """SGLang's class for Qwen3.5 has no `self_attn`."""
    assert said(draft(runs["norm of qwen"]).unwritten) == {(NORM, "model.layers.0.q_norm.weight")}


def test_what_sglang_drops_since_another_tensor_is_lost_is_named_too(runs):
    """It waits for both parts of a fused parameter."""
    report = draft(runs["compressed query"])
    assert [(one.tensor, one.param, one.what.partition(": ")[2]) for one in report.unwritten] == [
        (COMPRESSED[0], FUSED, text_with("no such tensor")),
        (COMPRESSED[1], FUSED, text_with("SGLang dropped")),
    ]
    assert {one.tensor for one in report.dropped} == {COMPRESSED[1]}


def test_lost_and_exchanged_parts_in_int4_are_named(runs):
    report = draft(runs["int4 broken"])
    expert = L + "mlp.experts.7.up_proj.weight_packed"
    assert said(report.unwritten) == {
        (L + "eh_proj.weight", "model.eh_proj.weight"),
        (L + "input_layernorm.weight", "model.decoder.input_layernorm.weight"),
        (expert, "model.decoder.mlp.experts.w13_weight_packed"),
    }
    assert {one.tensor for one in report.differing} == {
        f"{L}mlp.experts.{expert}.{part}_proj.weight_{kind}"
        for expert in (4, 5)
        for part in ("gate", "up", "down")
        for kind in ("packed", "scale")
    }


def test_a_copy_that_differs_from_what_sglang_takes_is_a_finding(judged):
    _, findings, _ = judged("copy")
    assert [(one.code, one.tensor) for one in findings] == [("CK503", EMBEDDING)]
    assert findings[0].actual == text_with("SGLang's model.embed_tokens.weight")
    assert "copies" in findings[0].hint


def test_a_draft_that_sglang_refuses_is_a_finding_in_its_words(cases, judged):
    results, findings, facts = judged("two layers")
    stored = models.tensors(cases["two layers"].checkpoint)
    draft_of_two = [name for name in stored if re.search(r"layers\.1[23]\.", name)]
    assert [(one.code, one.severity, one.count) for one in findings] == [("CK508", "error", len(draft_of_two))]
    assert "Only 1 nextn layer is supported" in findings[0].actual
    assert {code for code, result in results.items() if result.status != "passed"} == {"CK508"}
    assert "SGLang's draft model" not in facts


def test_without_a_draft_class_it_is_inconclusive(judged):
    results, findings, facts = judged("no class")
    assert findings == []
    assert {code: result.status for code, result in results.items() if result.status != "passed"} == {
        "CK508": "skipped"
    }
    assert results["CK508"].reason == text_with("SGLang Glm4MoeForCausalLM")
    assert "SGLang's draft model" not in facts


@before("sglang", (0, 5, 23), "Qwen3.5's draft class takes qkv_proj apart")
def test_names_of_shards_do_not_leave_out_the_fused_layer_of_a_draft(cases, judged):
    """SGLang's class of the model takes qkv_proj apart before it looks at `ignore`, and the draft class does not."""
    _, findings, _ = judged("qwen by names")
    shards = {f"mtp.layers.0.self_attn.{one}_proj.weight" for one in "qkv"}
    assert {one.tensor for one in findings if one.code == "CK503"} == shards
    found = {tensor: one for one in lint(cases["qwen by names"].checkpoint).findings for tensor in one.tensors}
    assert found.keys() == shards
    assert {(one.severity, one.readers, one.hint) for one in found.values()} == {
        ("error", ("SGLang 0.5.16", "SGLang 0.5.23"), r"use the entry 're:mtp\..*'")
    }
    wrong = [one for one in verify(cases["qwen by names"].checkpoint).findings if one.severity == "error"]
    assert [(one.code, one.hint) for one in wrong] == [("CK302", r"add 're:mtp\..*'")] * 2


def test_fused_experts_of_a_draft_that_no_entry_covers_are_found(cases, judged):
    _, findings, _ = judged("fused by names")
    assert [one.code for one in findings if one.severity == "error"] == ["CK508"]
    assert "experts.w2_weight" in findings[-1].actual
    report = lint(cases["fused by names"].checkpoint)
    fused = (f"{FUSED_EXPERTS}down_proj", f"{FUSED_EXPERTS}gate_up_proj")
    assert [(one.severity, one.tensors, one.readers) for one in report.findings] == [
        ("error", fused, ("SGLang 0.5.16", "SGLang 0.5.23")),
        ("warning", fused, VLLM),
    ]


@pytest.mark.parametrize("name", ["qwen by one entry", "fused by one entry"])
def test_one_entry_for_the_draft_is_read_alike(name, cases, judged):
    results, findings, _ = judged(name)
    assert [one for one in findings if one.severity == "error"] == []
    assert results["CK508"].status == "passed"
    assert lint(cases[name].checkpoint).findings == ()
    assert [one for one in verify(cases[name].checkpoint).findings if one.severity == "error"] == []


def test_without_such_layers_nothing_is_asked_of_draft_models(releases, tmp_path, runs):
    release = releases("glm4_moe-mtp")
    plain = {name: one for name, one in models.tensors(release).items() if not name.startswith(L)}
    path = written(tmp_path, "plain", release, plain, num_nextn_predict_layers=0)
    results, _, _ = checked(Case(path), answered(replace(reported(runs["no copies"]), draft_model=None)))
    assert "CK508" not in results
