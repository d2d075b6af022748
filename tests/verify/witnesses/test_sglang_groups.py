"""Config groups of INT4 checkpoints in real SGLang: what it loads and refuses, `lint` and `verify` say without it."""

import re

import pytest
import torch
from families import CASES
from families.table import config_of
from support import models
from support.installed import release
from support.quantized import group_config
from support.sglang_runs import Case, online_int4, refusal, written

from ckptkit.core.errors import CkptkitError
from ckptkit.quant.ignore.lint import lint
from ckptkit.verify.checks.witnesses.loading import keep_router
from ckptkit.verify.run import verify

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
BY_ROW = INT4 | {"strategy": "channel", "group_size": None}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
ROUTER = r"re:.*\.mlp\.gate(\.weight)?$"
KEPT = ["lm_head", "model.embed_tokens", ROUTER]
ATTENTION, EXPERTS = r"re:.*self_attn\.(q|k|v|qkv|o)_proj$", r"re:.*mlp\.experts\..*"
OTHER_FORMS, FLOAT = ("marlin-24", "naive-quantized"), "float-quantized"
EVERY = r"re:.*(q|k|v|qkv|o|gate|up|gate_up|down)_proj$"


def group(weights, *targets, activations=None, **more):
    return {"targets": list(targets), "weights": dict(weights), "input_activations": activations, **more}


def content(*groups, form="pack-quantized", ignore=KEPT):
    return group_config(form, *groups, ignore=ignore)


def in_fp8(tensors, wanted):
    found = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not wanted(name):
            found[name] = tensor
            continue
        scale = (tensor.float().abs().amax(1, keepdim=True) / 448).bfloat16()
        found |= {name: (tensor.float() / scale.float()).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    return found


def is_linear(name):
    return re.search(r"(layers|blocks)\.\d+\..*(proj|qkv|fc\d)\.weight$", name) is not None


@pytest.fixture(scope="module")
def cases(releases, tmp_path_factory):
    root = tmp_path_factory.mktemp("groups")
    release, vision = releases("qwen3_moe"), releases("qwen3_vl-tied")
    tensors, seen = models.tensors(release), models.tensors(vision)
    packed = online_int4(tensors, KEPT, 32)
    attention = {name: tensor for name, tensor in tensors.items() if ".self_attn." in name}
    beside = {name: tensor for name, tensor in tensors.items() if name not in attention}
    layers = [f"model.layers.{layer}.self_attn" for layer in range(12)]
    scales = {f"{layer}.{one}_proj.{one}_scale": torch.ones(1) / 2 for layer in layers for one in "kv"}
    mixed = online_int4(beside, KEPT, 32) | in_fp8(attention, is_linear)
    two = online_int4({name: one for name, one in tensors.items() if ".experts." not in name}, KEPT, 32)
    for name in (name for name in tensors if ".experts." in name):
        two |= online_int4({name: tensors[name]}, [], tensors[name].shape[1])
    halves = group(FP8, ATTENTION, activations=TOKENS), group(INT4, EXPERTS)
    own = [one | {"format": form} for one, form in zip(halves, (FLOAT, "pack-quantized"), strict=True)]
    tower = group(FP8, "Linear", activations=TOKENS)

    def case(name, stored, quantization, of=release):
        return Case(written(root, name.replace(" ", "-"), of, stored, quantization_config=quantization))

    unnamed = ["lm_head", "model.embed_tokens"]
    minimax = releases("minimax_m2")
    routers = online_int4(models.tensors(minimax), [*unnamed, "re:.*norm.*"], 32)

    wrong = {"strategy": "tensor", "group_size": None}
    kept = ["lm_head", "re:.*visual.*"]
    plain = in_fp8(seen, lambda name: is_linear(name) and "visual" not in name)
    return {
        "packed routers": case("packed routers", routers, content(group(INT4, "Linear"), ignore=unnamed), minimax),
        "regex": case("regex", packed, content(group(INT4, EVERY))),
        "two groups": case("two groups", packed, content(group(INT4, ATTENTION), group(INT4, EXPERTS))),
        "two sizes": case("two sizes", two, content(group(INT4, ATTENTION), group(BY_ROW, EXPERTS))),
        "beside fp8": case("beside fp8", mixed, content(*halves)),
        "cache": case("cache", packed | scales, content(group(INT4, "Linear")) | {"kv_cache_scheme": CACHE}),
        "mixed-precision": case("mixed-precision", mixed, content(*own, form="mixed-precision")),
        **{form: case(form, packed, content(group(INT4, "Linear"), form=form)) for form in OTHER_FORMS},
        "tensor": case("tensor", packed, content(group(INT4 | wrong, "Linear"))),
        "actorder": case("actorder", packed, content(group(INT4 | {"actorder": "group"}, "Linear"))),
        "no target": case("no target", packed, content(group(INT4, EXPERTS))),
        "fp8 tower": case("fp8 tower", in_fp8(seen, is_linear), content(tower, form=FLOAT, ignore=kept[:1]), vision),
        "plain tower": case("plain tower", plain, content(tower, form=FLOAT, ignore=kept), vision),
    }


SOUND = ("regex", "two groups", "two sizes", "beside fp8", "cache")
_NEWER = release("sglang") >= (0, 5, 23)
REFUSED = {
    "mixed-precision": ("ValueError" if _NEWER else "ImportError", "format is 'mixed-precision'"),
    "marlin-24": ("ImportError", "format is 'marlin-24'"),
    "naive-quantized": ("ImportError", "format is 'naive-quantized'"),
    "tensor": ("NotImplementedError" if _NEWER else "AttributeError", "strategy is 'tensor'"),
    "actorder": ("ValidationError", "actorder is 'group'"),
}


@pytest.mark.parametrize("name", SOUND)
def test_groups_that_sglang_loads_pass_without_it_too(name, cases, judged):
    results, findings, _ = judged(name)
    assert {code for code, result in results.items() if result.status == "passed"} >= {"CK501", "CK502", "CK504"}
    assert {(one.code, one.severity) for one in findings} == ({("CK503", "warning")} if name == "cache" else set())
    report = verify(cases[name].checkpoint)
    assert report.status == "passed"
    linted = lint(cases[name].checkpoint)
    assert not linted.failed
    # Those that are warned of are slime's, which reads the first group alone.
    assert {reader for one in linted.findings for reader in one.readers} <= {"slime"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_sglang_refuses_is_an_error_without_it_too(name, cases, runs, judged):
    if name == "actorder" and release("compressed-tensors") < (0, 19):
        assert not refusal(runs[name])
        assert not lint(cases[name].checkpoint).failed
        return
    exception, words = REFUSED[name]
    results, _, _ = judged(name)
    assert results["CK501"].status == "failed"
    assert exception in refusal(runs[name])
    found = [one for one in verify(cases[name].checkpoint).findings if one.code == "CK302"]
    assert words in found[0].actual
    assert found[0].severity == "error"
    linted = lint(cases[name].checkpoint)
    assert linted.failed
    assert [one.kind for one in linted.findings if words in one.message] == ["refused"]


def test_a_layer_without_a_target_is_named(cases, runs):
    assert "Unable to find matching target for model.layers.0.self_attn.qkv_proj" in refusal(runs["no target"])
    linted = lint(cases["no target"].checkpoint)
    refused = {one.readers for one in linted.findings if one.severity == "error"}
    assert refused == {("SGLang 0.5.16", "SGLang 0.5.23"), ("compressed-tensors", "transformers")}
    found = [one for one in verify(cases["no target"].checkpoint).findings if one.severity == "error"]
    assert {one.code for one in found} == {"CK302"}
    hints = [one.hint for one in (*linted.findings, *found)]
    assert all("targets" in hint for hint in hints)


def test_dropped_scales_of_a_vision_tower_are_a_finding(judged):
    """SGLang builds the tower in BF16, and its codes are then weights up to 448."""
    results, findings, _ = judged("fp8 tower")
    assert results["CK503"].status == "failed"
    dropped = {one.tensor for one in findings if one.code == "CK503"}
    assert "model.visual.blocks.{0..1}.mlp.linear_fc1.weight_scale" in dropped
    assert all("visual" in str(name) and str(name).endswith("weight_scale") for name in dropped)
    results, findings, _ = judged("plain tower")
    assert (results["CK503"].status, findings) == ("passed", [])


def test_packed_routers_are_left_out_by_their_familys_name(judged):
    """MiniMax-M2's router is `block_sparse_moe.gate`."""
    _, findings, _ = judged("packed routers")
    hints = [one.hint for one in findings if one.code == "CK505" or (one.tensor or "").endswith("gate.weight_packed")]
    assert len(hints) == 2
    assert all(r"`re:.*\.block_sparse_moe\.gate(\.weight)?$`" in hint for hint in hints)


def test_the_entry_for_routers_is_the_familys():
    entries = {"mixtral": r"block_sparse_moe\.gate", "glm4_moe": r"mlp\.gate", "gpt_oss": r"mlp\.router"}
    found = {name: keep_router(config_of(CASES[name])) for name in entries}
    assert found == {name: rf"re:.*\.{entry}(\.weight)?$" for name, entry in entries.items()}


def test_fp8_is_not_taken_for_int4(cases):
    report = lint(cases["plain tower"].checkpoint)
    assert report.scheme == "quantized"
    assert [one for one in report.findings if one.severity == "error"] == []


def test_layers_of_another_format_are_not_added_to_the_list(cases):
    """In `ignore` an engine would take them for BF16."""
    path = cases["beside fp8"].checkpoint
    report = lint(path)
    assert (report.packed, report.portable) == (12 * 12 * 3, None)
    before = (path / "config.json").read_bytes()
    with pytest.raises(CkptkitError, match="agree"):
        lint(path, fix=True)
    assert (path / "config.json").read_bytes() == before
