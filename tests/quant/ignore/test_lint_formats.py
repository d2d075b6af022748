"""`ckptkit lint` on FP8, MXFP8, MXFP4 and NVFP4: which reader reads which list, and what it makes of it."""

import json

import pytest
import torch
from click.testing import CliRunner
from families import CASES
from families.table import config_of
from safetensors.torch import save_file
from support import floats
from support.messages import refusal, text_with
from support.nightly import daily
from support.published import EXPERTS, GLM, LAYERS, PUBLISHED, QWEN, restored
from support.published import write_config as write
from support.quantized import group_config

from ckptkit.app.cli import cli
from ckptkit.quant.ignore.lint import lint
from ckptkit.quant.ignore.readers import SGLANG, TRANSFORMERS, VLLM

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MXFP8 = {"quant_method": "mxfp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
ROUTERS = [f"model.layers.{layer}.mlp.gate" for layer in range(LAYERS)]
ROUTER = "model.layers.{0..3}.mlp.gate.weight"
PROJECTIONS = [f"self_attn.{one}_proj" for one in "qkvo"] + [
    f"mlp.experts.{expert}.{one}_proj" for expert in range(EXPERTS) for one in ("gate", "up", "down")
]


def qwen_names(packed=PROJECTIONS, scale="weight_scale_inv"):
    """The tensors of Qwen3-MoE in FP8, with a scale beside each module of `packed`."""
    outside = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    inside = [
        f"model.layers.{layer}.{name}"
        for layer in range(LAYERS)
        for name in (
            *(f"{one}.weight" for one in (*PROJECTIONS, "mlp.gate", "input_layernorm")),
            *(f"{one}.{scale}" for one in packed),
        )
    ]
    return [*outside, *inside]


def found(report):
    return [(one.severity, one.kind, one.tensors, one.readers) for one in report.findings if one.severity != "note"]


def test_a_release_that_names_whole_modules_is_clean(tmp_path):
    content = {**FP8, "modules_to_not_convert": ["lm_head", *ROUTERS, "model.layers.0.input_layernorm"]}
    report = lint(write(tmp_path, QWEN, content, qwen_names()))
    assert (found(report), report.packed, report.key) == ([], LAYERS * len(PROJECTIONS), "modules_to_not_convert")
    assert report.portable == ("lm_head", *ROUTERS, "model.layers.0.input_layernorm")


@pytest.mark.parametrize("content", [FP8, {**FP8, "modules_to_not_convert": []}])
def test_vllm_builds_a_router_in_fp8_that_no_entry_names(tmp_path, content):
    path = write(tmp_path, QWEN, content, qwen_names())
    report = lint(path)
    assert found(report) == [("warning", "exposed", (ROUTER,), VLLM)]
    assert report.portable == tuple(ROUTERS)
    refusal("unknown reader", lint, path, readers=["nobody"])
    assert found(lint(path, readers=["vllm"])) == [("error", "exposed", (ROUTER,), VLLM)]


def test_fix_writes_whole_names_under_the_key_that_all_read(tmp_path):
    path = write(tmp_path, QWEN, {**FP8, "ignored_layers": ["lm_head", "mlp.gate"]}, qwen_names())
    before = (path / "config.json").read_bytes()
    assert found(lint(path)) == [("warning", "exposed", (ROUTER,), VLLM)]
    assert lint(path, fix=True).fixed
    content = json.loads((path / "config.json").read_text())["quantization_config"]
    assert content == {**FP8, "modules_to_not_convert": ["lm_head", *ROUTERS]}
    assert (path / "config.json.orig").read_bytes() == before
    assert found(lint(path)) == []


def test_vllm_reads_only_ignored_layers_of_mxfp8(tmp_path):
    path = write(tmp_path, QWEN, {**MXFP8, "modules_to_not_convert": ["lm_head", *ROUTERS]}, qwen_names())
    report = lint(path)
    assert ("warning", "exposed", (ROUTER,), VLLM) in found(report)
    messages = [one.message for one in report.findings if one.readers == VLLM]
    assert all("`modules_to_not_convert`" in one for one in messages)
    assert {"Qwen3MoeTopKRouter" in one for one in messages} == {True, False}
    lint(path, fix=True)
    content = json.loads((path / "config.json").read_text())["quantization_config"]
    assert content["ignored_layers"] == content["modules_to_not_convert"]
    assert sorted(content["ignored_layers"]) == sorted(["lm_head", *ROUTERS])
    assert found(lint(path)) == []


def test_sglang_0_5_16_reads_only_ignore_of_modelopt(tmp_path):
    names = qwen_names([f"mlp.experts.{e}.{one}_proj" for e in range(EXPERTS) for one in ("gate", "up", "down")])
    attention = [f"model.layers.{layer}.self_attn" for layer in range(LAYERS)]
    listed = ["lm_head", *ROUTERS, *attention]
    report = lint(write(tmp_path, QWEN, {**NVFP4, "exclude_modules": listed}, names))
    assert {(severity, who) for severity, _, _, who in found(report)} == {("error", ("SGLang 0.5.16",))}
    assert found(lint(write(tmp_path, QWEN, {**NVFP4, "ignore": listed}, names))) == []


def test_hf_quant_config_alone_is_read_and_another_one_is_found(tmp_path):
    path = write(tmp_path, QWEN, None, qwen_names(scale="weight_scale_2"))
    other = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "*mlp.gate"]}}
    (path / "hf_quant_config.json").write_text(json.dumps(other))
    report = lint(path)
    assert (found(report), report.packed) == ([], LAYERS * len(PROJECTIONS))
    write(path, QWEN, {**NVFP4, "quant_algo": "FP8", "ignore": ["lm_head", *ROUTERS]})
    differing = [(one.severity, one.message) for one in lint(path).findings if one.kind == "two configs"]
    assert differing == [("error", text_with("quant_algo FP8 NVFP4")), ("error", text_with("ignore"))]


def test_engines_leave_all_experts_out_for_an_entry_of_one(tmp_path):
    content = {**FP8, "modules_to_not_convert": ["lm_head", *ROUTERS, "model.layers.2.mlp.experts.7.gate_proj"]}
    report = lint(write(tmp_path, QWEN, content, qwen_names()))
    engines = [one for one in report.findings if one.kind == "disagreement" and one.severity != "note"]
    assert {(one.severity, one.readers) for one in engines} == {("error", SGLANG), ("warning", VLLM)}
    assert sum(one.count for one in engines) == 2 * 3 * EXPERTS


def test_a_router_stored_in_fp8_is_an_error(tmp_path):
    content = {**FP8, "modules_to_not_convert": ["lm_head"]}
    report = lint(write(tmp_path, QWEN, content, qwen_names([*PROJECTIONS, "mlp.gate"])))
    (packed,) = [one for one in report.findings if one.kind == "packed"]
    assert (packed.severity, packed.tensors) == ("error", (ROUTER,))
    assert set(SGLANG) < set(packed.readers)
    assert not set(VLLM) & set(packed.readers)  # which builds it so, unless a list names it
    assert "packed" not in {one.kind for one in lint(tmp_path, readers=["vllm"]).findings}


def test_a_gate_projection_without_its_up_projection_is_an_error(tmp_path):
    shards = [one for one in PROJECTIONS if one != "self_attn.k_proj"]
    report = lint(write(tmp_path, QWEN, {**FP8, "modules_to_not_convert": ["lm_head", *ROUTERS]}, qwen_names(shards)))
    partly = [(one.severity, one.tensors) for one in report.findings if one.kind == "partly ignored"]
    assert partly == [("error", ("model.layers.{0..3}.self_attn.k_proj.weight",))]


def test_transformers_raises_for_a_glob_and_reads_prefixes(tmp_path):
    report = lint(write(tmp_path, QWEN, {**FP8, "modules_to_not_convert": ["lm_head", "*mlp.gate"]}, qwen_names()))
    refused = [one for one in report.findings if one.kind == "refused"]
    assert [one.readers for one in refused] == [(one,) for one in TRANSFORMERS]
    config = {**QWEN, "num_hidden_layers": 12}
    report = lint(write(tmp_path / "long", config, {**FP8, "modules_to_not_convert": ["lm_head", "model.layers.1"]}))
    swallowed = [one for one in report.findings if one.pattern == "model.layers.1"]
    assert {one.readers for one in swallowed if "{10..11}" in one.tensors[0]} == {("transformers 5.12",)}


EIGHT = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
FOUR = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}


def test_several_groups_of_floats_each_have_their_modules(tmp_path):
    attention = {"targets": [r"re:.*self_attn\..*_proj$"], "weights": EIGHT, "format": "float-quantized"}
    experts = {"targets": [r"re:.*\.experts\..*"], "weights": FOUR, "format": "nvfp4-pack-quantized"}
    names = [
        name.replace(".weight", ".weight_packed") if ".experts." in name and name.endswith(".weight") else name
        for name in qwen_names(PROJECTIONS, "weight_scale")
    ]
    content = group_config("mixed-precision", attention, experts, ignore=["lm_head", *ROUTERS])
    report = lint(write(tmp_path, QWEN, content, names))
    assert report.packed == LAYERS * sum(".experts." in one for one in PROJECTIONS)
    assert [one for one in found(report) if one[0] == "error"] == []


def test_layers_of_their_own_algorithm_are_read(tmp_path):
    modules = [f"model.layers.{layer}.{one}" for layer in range(LAYERS) for one in PROJECTIONS]
    layers = {one: {"quant_algo": "FP8" if "attn" in one else "NVFP4"} for one in modules}
    content = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    report = lint(write(tmp_path, QWEN, content, qwen_names(scale="weight_scale")))
    assert (found(report), report.packed) == ([], len(modules))


def test_quark_excludes_by_whole_names_or_expressions(tmp_path):
    left_out = "model.layers.0.self_attn.o_proj"
    content = {"quant_method": "quark", "exclude": ["lm_head", "re:.*mlp.gate$", left_out]}
    names = [name for name in qwen_names(scale="weight_scale") if name != f"{left_out}.weight_scale"]
    assert found(lint(write(tmp_path, QWEN, content, names))) == []


@pytest.mark.parametrize("draft_in_fp8", [True, False])
def test_sglang_asks_for_the_draft_layer_of_qwen3_next_as_for_the_first_layer(draft_in_fp8, releases, tmp_path):
    """Its `Qwen3NextForCausalLMMTP` builds a `Qwen3NextModel` of one layer under `model`, whatever the list says."""
    path = floats.write(
        releases("qwen3_next"),
        tmp_path / "fp8",
        floats.SPELLINGS["fp8"],
        lambda name: name.endswith("_proj.weight") and (draft_in_fp8 or not name.startswith("mtp.")),
    )
    linear = [f"model.layers.{layer}.linear_attn.in_proj_{part}" for layer in range(12) for part in ("ba", "qkvz")]
    config = json.loads((path / "config.json").read_text())
    content = config["quantization_config"]
    content["ignored_layers"] = [*content.get("ignored_layers", []), *linear]
    (path / "config.json").write_text(json.dumps(config))
    errors = [one for one in lint(path).findings if one.severity == "error"]
    assert [one for one in errors if draft_in_fp8 or not one.tensors[0].startswith("mtp.layers.0.")] == []
    assert bool(errors) != draft_in_fp8


def test_a_model_that_is_not_known_is_not_judged(tmp_path):
    content = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    report = lint(write(tmp_path, {"model_type": "gpt_oss"}, content))
    assert [(one.severity, one.kind) for one in report.findings] == [("note", "not judged")]


def test_a_stated_cache_without_scales_is_a_note(tmp_path):
    content = {**NVFP4, "ignore": ["lm_head", *ROUTERS], "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    names = qwen_names(scale="weight_scale_2")
    scales = [f"model.layers.{layer}.self_attn.k_proj.k_scale" for layer in range(LAYERS)]
    for more, expected in (([], {"cache scales"}), (scales, set())):
        notes = lint(write(tmp_path, QWEN, content, [*names, *more])).findings
        assert {one.kind for one in notes if one.severity == "note"} & {"cache scales"} == expected


def test_a_trainer_is_judged_as_an_error_only_where_it_is_asked_for(tmp_path):
    content = {**FP8, "modules_to_not_convert": ["lm_head", *ROUTERS]}
    path = write(tmp_path, QWEN, content, qwen_names())
    for readers, severity in ((None, "note"), (["nemo-rl"], "error")):
        found = lint(path, readers=readers).findings
        assert [(one.severity, one.readers) for one in found] == [(severity, ("NeMo-RL",))]
    assert lint(path, readers=["slime", "miles", "verl"]).findings == ()


def test_names_of_another_format_are_refused_for_a_reader_that_has_none(tmp_path):
    path = write(tmp_path, GLM, {"quant_method": "quark", "exclude": []})
    refusal("quark", lint, path, readers=["slime"])


CHANNEL = group_config("float-quantized", {"targets": ["Linear"], "weights": EIGHT})


@pytest.mark.parametrize(
    ("content", "scale", "readers"),
    [
        (FP8, "weight_scale_inv", ()),
        ({**FP8, "weight_block_size": None}, "weight_scale", SGLANG),
        (MXFP8, "weight_scale_inv", SGLANG),
        (CHANNEL, "weight_scale", SGLANG),
        (NVFP4, "weight_scale", SGLANG),
    ],
)
def test_an_indexers_key_weight_in_what_sglang_does_not_dequantize_is_an_error(content, scale, readers, tmp_path):
    """SGLang joins it to weights in BF16. The twin is FP8 in blocks, which it dequantizes; vLLM is not asked."""
    key = "model.layers.0.self_attn.indexer.wk"
    path = write(tmp_path, config_of(CASES["deepseek_v32"]), content, [f"{key}.weight", f"{key}.{scale}"])
    several = [one for one in lint(path, readers=["sglang"]).findings if one.kind == "packed"]
    assert [(one.severity, one.tensors, one.readers) for one in several] == (
        [("error", (f"{key}.weight",), readers)] if readers else []
    )
    assert [one for one in lint(path, readers=["vllm"]).findings if one.kind == "packed"] == []


# Published FP8, MXFP4 and NVFP4 configs. `published_configs.json` has of each release the quantization section, and of
# its config what its modules follow from, as a public repository has them (`source`). Names that differ in numbers
# alone stand folded. Experts are cut to 16: no list names one of them.
EVERY_DAY = ("Qwen/Qwen3-32B-FP8", "deepseek-ai/DeepSeek-V3", "nvidia/Qwen3.6-27B-NVFP4", "openai/gpt-oss-20b")
# Models whose modules ckptkit does not know: their entries are not held against any.
UNKNOWN = ("deepseek_ref", "gpt_oss", "kimi_k3", "mimo_v2_flash")


def published(path, release):
    entry = PUBLISHED[release]
    config = restored(entry["config"])
    if "first_k_dense_replace" in config:  # a family whose configs may leave the number of experts out
        config.setdefault("n_routed_experts", 16)
    if "quantization_config" in entry:
        config["quantization_config"] = restored(entry["quantization_config"])
    (path / "config.json").write_text(json.dumps(config))
    if "hf_quant_config" in entry:
        (path / "hf_quant_config.json").write_text(json.dumps(restored(entry["hf_quant_config"])))
    return path


@pytest.mark.parametrize("release", daily(PUBLISHED, EVERY_DAY))
def test_lint_reads_a_published_config_without_a_false_alarm(tmp_path, release):
    report = lint(published(tmp_path, release))
    assert [one for one in report.findings if one.severity != "note"] == []
    assert (report.tensors == 0) == (PUBLISHED[release]["config"]["model_type"] in UNKNOWN)


@pytest.mark.parametrize("release", daily(PUBLISHED, EVERY_DAY[-1:]))
def test_inspect_reads_a_published_config(tmp_path, release):
    save_file({"model.norm.weight": torch.zeros(4)}, published(tmp_path, release) / "model.safetensors")
    shown = CliRunner().invoke(cli, ["inspect", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "model.norm.weight [4]" in shown.output
