"""Whole checkpoints in FP8 and 4-bit floats: what is quantized, what config.json says, who loads it, writers' bytes."""

import json
import re
from collections import defaultdict

import pytest
import torch
from click.testing import CliRunner
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.utils import match_name
from families import case
from support import models
from support.engine_models import MODELS, saved
from support.messages import refusal, text_with
from support.nightly import daily
from support.sglang_sizes import widened

from ckptkit.app.api import convert, quantize
from ckptkit.app.cli import cli
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.quant.ignore.lint import lint
from ckptkit.quant.schemes.floats import FloatScheme
from ckptkit.verify.evidence.extremes import same_bytes
from ckptkit.verify.run import verify

LAYERS = range(6)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def passed_without_error(report):
    """The checks that passed, of a report in which none failed."""
    assert [finding.code for finding in report.findings if finding.severity == "error"] == []
    return {check.code for check in report.checks if check.status == "passed"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """`plain(name)`: one of the models whose sizes blocks of 128 divide, or a test model in such sizes."""
    root = tmp_path_factory.mktemp("plain")

    def source(name):
        if not (root / name).exists() and name in MODELS:
            saved(name, root)
        elif not (root / name).exists():
            case.save(name, widened(name), root / name, torch.bfloat16)
        return root / name

    return source


def config_of(path):
    return json.loads((path / "config.json").read_text())["quantization_config"]


def in_fp8(path):
    return {
        name.removesuffix(".weight")
        for name, tensor in models.tensors(path).items()
        if tensor.dtype == torch.float8_e4m3fn
    }


def run(*arguments):
    return CliRunner().invoke(cli, [*map(str, arguments)])


def test_linear_layers_are_fp8_and_config_names_the_rest(plain, tmp_path):
    quantize(plain("moe"), tmp_path / "out", FloatScheme("fp8-block"))
    layers = [f"model.layers.{layer}" for layer in LAYERS]
    experts = {f"{at}.mlp.experts.{expert}.{name}" for at in layers for expert in range(16) for name in MLP}
    assert in_fp8(tmp_path / "out") == experts | {f"{at}.self_attn.{name}" for at in layers for name in ATTENTION}
    assert config_of(tmp_path / "out") == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens", *(f"{at}.mlp.gate" for at in layers)],
    }


def test_fp8_channel_is_laid_out_as_compressed_tensors_reads_it(plain, tmp_path):
    quantize(plain("mla"), tmp_path / "out", FloatScheme("fp8-channel"))
    group = QuantizationConfig.model_validate(config_of(tmp_path / "out")).config_groups["group_0"]
    assert (group.weights.strategy, group.weights.num_bits, group.weights.type) == ("channel", 8, "float")
    assert (group.input_activations.strategy, group.input_activations.dynamic) == ("token", True)
    written, source = models.tensors(tmp_path / "out"), models.tensors(plain("mla"))
    name = "model.layers.2.self_attn.q_a_proj.weight"
    largest = source[name].float().abs().amax(1, keepdim=True)
    assert torch.equal(written[f"{name}_scale"], largest / torch.full_like(largest, 448))
    assert "re:" not in str(config_of(tmp_path / "out")["ignore"])
    assert lint(tmp_path / "out").findings == ()  # its draft layer is packed, and readers without one do not care


def test_mxfp8_has_an_exponent_for_each_32_neighbours(plain, tmp_path):
    quantize(plain("moe"), tmp_path / "out", FloatScheme("mxfp8"))
    content = config_of(tmp_path / "out")
    assert [content[key] for key in ("quant_method", "weight_block_size", "scale_fmt")] == ["mxfp8", [1, 32], "ue8m0"]
    assert content["modules_to_not_convert"][:3] == ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"]
    written = models.tensors(tmp_path / "out")
    assert len(in_fp8(tmp_path / "out")) == 6 * (4 + 16 * 3)
    assert {written[f"{name}.weight_scale_inv"].dtype for name in in_fp8(tmp_path / "out")} == {torch.uint8}
    assert verify(tmp_path / "out", source=plain("moe")).status == "passed"


def test_mxfp8_for_vllm_alone_is_spelled_as_modelopts(plain, tmp_path):
    quantize(plain("dense"), tmp_path / "out", FloatScheme("mxfp8"), readers=["vllm"])
    content = config_of(tmp_path / "out")
    assert content["ignored_layers"] == ["lm_head", "model.embed_tokens"]
    assert "modules_to_not_convert" not in content
    scales = {name.rpartition(".")[2] for name in models.tensors(tmp_path / "out") if "scale" in name}
    assert scales == {"weight_scale"}
    report = verify(tmp_path / "out", source=plain("dense"))
    assert report.status == "passed", report.findings


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_four_bits_are_what_compressed_tensors_reads(name, plain, tmp_path):
    result = quantize(plain("moe"), tmp_path / "out", FloatScheme(name, "compressed-tensors"))
    preset = preset_name_to_scheme(f"{name.upper()}A16", ["Linear"])
    group = QuantizationConfig.model_validate(config_of(tmp_path / "out")).config_groups["group_0"]
    assert group.weights == preset.weights
    assert group.input_activations is None
    written, source = models.tensors(tmp_path / "out"), models.tensors(plain("moe"))
    packed = {name.removesuffix("_packed") for name in written if name.endswith(".weight_packed")}
    layers = [f"model.layers.{layer}" for layer in LAYERS]
    experts = {f"{at}.mlp.experts.{expert}.{one}.weight" for at in layers for expert in range(16) for one in MLP}
    assert packed == experts | {f"{at}.self_attn.{one}.weight" for at in layers for one in ATTENTION}
    compressor = BaseCompressor.get_value_from_registry(group.format)
    endings, width = compressor.compression_param_names(group), (-1, group.weights.group_size)
    for weight in packed:
        parts = {ending: written[f"{weight.removesuffix('weight')}{ending}"] for ending in endings}
        values = compressor.decompress(parts, group)["weight"]
        largest = source[weight].float().abs().unflatten(1, width).amax(-1)
        error = (values.float() - source[weight].float()).abs().unflatten(1, width).amax(-1)
        assert bool((error <= largest / 5).all()), weight
    assert "SGLang 0.5.16 does not read" in result.notes[0]
    report = lint(tmp_path / "out")
    assert (report.findings, report.packed) == ((), len(packed))
    assert name.upper() in run("inspect", tmp_path / "out").output


def test_four_bits_that_are_exact_are_packed_to_themselves(plain, tmp_path):
    """From MXFP4 to BF16 and back, with the proof of both. Of zeros the sign is lost, as in compressed-tensors."""
    quantize(plain("dense"), tmp_path / "mxfp4", FloatScheme("mxfp4"))
    convert(tmp_path / "mxfp4", tmp_path / "megatron")
    quantized = ("--quantize", "mxfp4", "--exact")
    result = run("convert", tmp_path / "megatron", tmp_path / "again", "--hf", tmp_path / "mxfp4", *quantized)
    assert result.exit_code == 0, result.output
    once, again = models.tensors(tmp_path / "mxfp4"), models.tensors(tmp_path / "again")
    assert once.keys() == again.keys()
    for name, found in again.items():
        if name.endswith("_packed"):
            halves = torch.stack((once[name] & 15, once[name] >> 4), -1)
            halves[halves == 8] = 0
            assert torch.equal(found, halves[..., 0] | (halves[..., 1] << 4)), name
        else:
            assert torch.equal(found.view(torch.uint8), once[name].view(torch.uint8)), name


def test_draft_layers_are_fp8_but_for_what_joins_them_to_the_model(plain, tmp_path):
    quantize(plain("glm"), tmp_path / "out", FloatScheme("fp8-block"))
    draft = "model.layers.6"
    assert {f"{draft}.self_attn.q_proj", f"{draft}.mlp.experts.3.up_proj"} <= in_fp8(tmp_path / "out")
    left = {name for name in config_of(tmp_path / "out")["modules_to_not_convert"] if name.startswith(draft)}
    joining = ("eh_proj", "embed_tokens", "mlp.gate", "shared_head.head")
    assert left == {f"{draft}.{name}" for name in joining}


def test_what_blocks_do_not_divide_stays_with_all_that_engines_join_to_it(plain, tmp_path):
    result = quantize(plain("mla"), tmp_path / "out", FloatScheme("fp8-block"))
    left = {name.rpartition(".")[2] for name in config_of(tmp_path / "out")["modules_to_not_convert"]}
    assert {"q_a_proj", "kv_a_proj_with_mqa", "q_b_proj"} <= left
    assert not {name for name in in_fp8(tmp_path / "out") if name.endswith(("q_a_proj", "kv_a_proj_with_mqa"))}
    assert {"model.layers.3.self_attn.kv_b_proj", "model.layers.3.mlp.shared_experts.up_proj"} <= in_fp8(
        tmp_path / "out"
    )
    assert len(result.notes) == 2
    assert result.notes[0] == text_with("128 model.layers.{0..6}")


def test_left_out_experts_are_named_as_readers_ask_for_them(plain, tmp_path):
    scheme = FloatScheme("fp8-channel", ignore=(r"re:.*\.layers\.3\.mlp\.experts\..*",))
    quantize(plain("moe"), tmp_path / "out", scheme)
    ignore, packed = config_of(tmp_path / "out")["ignore"], in_fp8(tmp_path / "out")
    for layer, left in ((3, True), (4, False)):
        for name in (f"model.layers.{layer}.mlp.experts.{expert}.gate_proj" for expert in (0, 11)):
            assert any(match_name(name, entry) for entry in ignore) is left
            assert (name in packed) is not left
    assert lint(tmp_path / "out", readers=("vllm", "transformers")).findings == ()


@pytest.mark.parametrize(
    ("model", "scheme", "words"),
    [
        ("llama", FloatScheme("fp8-block"), ["SGLang 0.5.16 weight_scale_inv"]),
        ("llama", FloatScheme("fp8-block", "compressed-tensors"), []),
        ("llama", FloatScheme("fp8-channel"), []),
        ("mistral3", FloatScheme("fp8-block"), ["SGLang 0.5.16 vLLM 0.26"]),
        ("mistral3", FloatScheme("mxfp8"), ["SGLang 0.5.16"]),
        ("nemotron_h", FloatScheme("fp8-block"), ["vLLM 0.26"]),
        ("nemotron_h", FloatScheme("fp8-channel"), ["FP8 SGLang 0.5.16"]),
        ("nemotron_h", FloatScheme("fp8-channel", ignore=(r"re:.*\.experts\..*",)), []),
        ("qwen2_5_vl", FloatScheme("nvfp4"), ["SGLang 0.5.16 Qwen2.5-VL"]),
    ],
    ids=str,
)
def test_notes_say_what_engines_would_not_load(model, scheme, words, plain, tmp_path):
    """What `verify --against-sglang` and `--against-vllm` found of each, in the versions that the notes name."""
    notes = quantize(plain(model), tmp_path / "out", scheme, readers=("sglang", "vllm")).notes
    notes = [note for note in notes if "megatron-core" not in note]
    assert notes == [text_with(one) for one in words], notes


def test_exact_takes_what_would_not_change(plain, tmp_path):
    quantize(plain("dense"), tmp_path / "powers", FloatScheme("fp8-block", "deepgemm"))
    quantize(tmp_path / "powers", tmp_path / "again", FloatScheme("mxfp8", exact=True))


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        (FloatScheme("fp8-block", ignore=(r"re:.*\.k_proj$",)), {}, r"k_proj\.weight"),
        (FloatScheme("fp8-block", ignore=("re:.*",)), {}, "quantize"),
        (FloatScheme("fp8-block"), {"like": "plain"}, "--like"),
        (FloatScheme("fp8-block", "slime"), {"preset": "rl"}, "--preset rl .* online"),
        (FloatScheme("fp8-channel"), {"preset": "rl"}, "--preset.*fp8-channel"),
        (FloatScheme("mxfp8", exact=True), {}, r"\[0, \d+\]"),
        (FloatScheme("mxfp4", exact=True), {}, r"\[0, \d+\]"),
    ],
    ids=str,
)
def test_what_cannot_be_quantized_is_refused_and_nothing_is_written(scheme, options, message, plain, tmp_path):
    options = {key: plain("dense") if key == "like" else value for key, value in options.items()}
    refusal(message, quantize, plain("dense"), tmp_path / "out", scheme, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["fp8-block", "nvfp4"])
def test_like_quantizes_what_another_release_has_in_the_scheme(name, plain, tmp_path):
    quantize(plain("dense"), tmp_path / "like", FloatScheme(name, ignore=(r"re:.*\.self_attn\..*",)))
    quantize(plain("dense"), tmp_path / "out", FloatScheme(name), like=tmp_path / "like")
    like, out = (models.tensors(tmp_path / name) for name in ("like", "out"))
    assert like.keys() == out.keys()
    assert not [name for name in out if "self_attn" in name and "scale" in name]
    assert config_of(tmp_path / "out") == config_of(tmp_path / "like")


def test_fp8_quantized_again_keeps_every_byte(plain, tmp_path):
    quantize(plain("moe"), tmp_path / "once", FloatScheme("fp8-block"))
    quantize(tmp_path / "once", tmp_path / "twice", FloatScheme("fp8-block"))
    assert models.unequal(tmp_path / "twice", tmp_path / "once") == []


@pytest.mark.parametrize(("name", "scheme", "rounding"), [("moe", "fp8-block", "slime"), ("mla", "nvfp4", "modelopt")])
def test_megatron_becomes_floats_in_one_pass(name, scheme, rounding, plain, tmp_path):
    convert(plain(name), tmp_path / "megatron")
    options = ("--quantize", scheme, "--rounding", rounding)
    result = run("convert", tmp_path / "megatron", tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    quantize(plain(name), tmp_path / "wanted", FloatScheme(scheme, rounding))
    found, wanted = models.tensors(tmp_path / "out"), models.tensors(tmp_path / "wanted")
    assert found.keys() == wanted.keys()
    assert all(same_bytes(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("options", [("--scheme", "fp8-block", "--group-size", "32"), ("--rounding", "slime")])
def test_options_of_another_scheme_are_refused(options, plain, tmp_path):
    result = run("quantize", plain("dense"), tmp_path / "out", *options)
    assert (result.exit_code, options[-2] in result.output) == (2, True)


@pytest.mark.parametrize(("given", "message"), [(("fp9",), "'fp9'"), (("fp8-block", "nearest"), "'nearest'")])
def test_a_scheme_that_is_not_known_is_refused(given, message):
    refusal(message, FloatScheme, *given)


MODELOPT = FloatScheme("nvfp4")
# What an engine calls the layer that it makes of a projection and others; by hand.
JOINED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "qkv_a"),
}


@pytest.fixture(scope="module")
def packed(plain, tmp_path_factory):
    root = tmp_path_factory.mktemp("packed")

    def made(name):
        if not (root / name).exists():
            quantize(plain(name), root / name, MODELOPT)
        return root / name

    return made


def largest(weights):
    return torch.stack([weight.float().abs().amax() for weight in weights]).amax() / torch.tensor(2688.0)


@pytest.mark.parametrize("name", ["dense", "moe", "mla", "mixtral"])
def test_what_kernels_join_has_one_scale_and_passes(name, plain, packed):
    written, source = models.tensors(packed(name)), models.tensors(plain(name))
    sets = defaultdict(list)
    codes = [name.removesuffix("_scale_2") for name in written if name.endswith(".weight_scale_2")]
    for weight in codes:
        parent, _, projection = weight.removesuffix(".weight").rpartition(".")
        sets[parent, JOINED.get(projection, projection)].append(weight)
    sizes = {len(weights) for weights in sets.values()}
    assert sizes == ({1, 2} if name == "mla" else {1, 2, 3})
    for weights in sets.values():
        wanted = largest([source[weight] for weight in weights])
        assert [float(written[f"{weight}_scale_2"]) for weight in weights] == [float(wanted)] * len(weights)
    report = verify(packed(name), source=plain(name))
    assert report.status == "passed", report.findings
    assert (lint(packed(name)).findings, lint(packed(name)).packed) == ((), len(codes))


def test_latent_attention_keeps_what_sglang_computes_with_itself(packed):
    written = models.tensors(packed("mla"))
    kept = {name for name in written if name.endswith("kv_b_proj.weight")}
    assert len(kept) == 7
    assert {written[name].dtype for name in kept} == {torch.bfloat16}


def test_config_names_each_layer_as_engines_ask_for_it(packed):
    """By itself and fused, and experts by their container: SGLang 0.5.16 knows W4A16_NVFP4 by layer alone."""
    content = json.loads((packed("moe") / "config.json").read_text())["quantization_config"]
    layers = content.pop("quantized_layers")
    assert content == {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}
    parts = ("mlp.experts", *(f"self_attn.{one}_proj" for one in ("k", "o", "q", "qkv", "v")))
    assert list(layers) == [f"model.layers.{layer}.{part}" for layer in range(6) for part in parts]
    assert {json.dumps(one) for one in layers.values()} == {'{"quant_algo": "W4A16_NVFP4", "group_size": 16}'}


def test_parts_stay_in_the_shards_of_their_weights(plain, packed):
    before, after = HfCheckpoint(plain("dense")).layout, HfCheckpoint(packed("dense")).layout
    assert {file: {re.sub(r"_scale(_2)?$", "", name) for name in names} for file, names in after.items()} == {
        file: set(names) for file, names in before.items()
    }
    attention = [name for file, names in before.items() for name in names if ".1.self_attn." in name]
    assert len({file for file, names in before.items() if set(attention) & set(names)}) > 1


@pytest.mark.usefixtures("kernel_tiles")
def test_a_layer_that_no_kernel_runs_is_noted(plain, tmp_path):
    """The first projections of latent attention have 96 and 576 rows together: no multiple of 64."""
    notes = quantize(plain("mla"), tmp_path / "out", MODELOPT).notes
    assert ["no NVFP4 kernel" in note for note in notes] == [True]
    assert "q_a_proj.weight: shape [672, 256]" in notes[0]
    assert not quantize(plain("mla"), tmp_path / "other", MODELOPT, readers=["vllm"]).notes


# By model and scheme, what SGLang passes beside CK501, CK502 and CK503. Blocks do not fit latent attention of 96 rows:
# SGLang must be told so, by its draft class's names too. Of latent attention's first projections it takes one scale of
# NVFP4, and drops the other; of in_proj_qkvz it fills one of four.
IN_SGLANG = {
    **dict.fromkeys(("moe fp8-block", "mla fp8-block", "glm fp8-block"), "CK504 CK505"),
    **dict.fromkeys(("qwen3_next fp8-block", "qwen3_vl_moe fp8-block"), "CK505"),
    "qwen2_5_vl fp8-block": "",
    **dict.fromkeys(("dense nvfp4", "moe nvfp4", "mla nvfp4", "glm nvfp4"), "CK504"),
    "qwen3_next nvfp4": "CK508",
}


@pytest.mark.usefixtures("served_sglang")
@pytest.mark.sglang
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", daily(IN_SGLANG, ["mla nvfp4"]))
def test_sglang_loads_every_value(cell, plain, tmp_path):
    name, scheme = cell.split()
    quantize(plain(name), tmp_path / "out", FloatScheme(scheme))
    report = verify(tmp_path / "out", source=plain(name), against=frozenset({"sglang"}))
    passed = passed_without_error(report)
    assert {"CK501", "CK502", "CK503", *IN_SGLANG[cell].split()} <= passed
    if scheme == "fp8-block":
        assert ("CK505" in passed) == (name != "qwen2_5_vl")  # routers
    stored = models.tensors(tmp_path / "out")
    assert not [name for name in stored if scheme == "nvfp4" and "in_proj_qkvz" in name and "scale" in name]


@pytest.mark.usefixtures("served_sglang")
@pytest.mark.sglang
@pytest.mark.timeout(900)
def test_a_scale_that_sglang_drops_is_named_where_it_is_another(plain, tmp_path):
    quantize(plain("mla"), tmp_path / "out", MODELOPT)
    name = "model.layers.2.self_attn.kv_a_proj_with_mqa.weight_scale_2"
    models.edit(tmp_path / "out", name, models.tensors(tmp_path / "out")[name] * 1.5)
    findings = verify(tmp_path / "out", against=frozenset({"sglang"})).findings
    assert [finding.tensor for finding in findings if finding.code == "CK503"] == [name]


IN_VLLM = [f"{name} {scheme}" for name in ("moe", "mla", "dense") for scheme in ("mxfp4", "nvfp4")]


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cell", daily(IN_VLLM, ["moe mxfp4", "moe nvfp4"]))
def test_vllm_loads_four_bits(cell, plain, tmp_path):
    name, scheme = cell.split()
    for rounding in ("modelopt", "compressed-tensors") if scheme == "nvfp4" else ("compressed-tensors",):
        quantize(plain(name), tmp_path / rounding, FloatScheme(scheme, rounding))
        report = verify(tmp_path / rounding, source=plain(name), against=frozenset({"vllm"}))
        passed = passed_without_error(report)
        assert {"CK521", "CK522", "CK523"} <= passed
        assert ("CK525" in passed) == (name != "dense")  # routers
