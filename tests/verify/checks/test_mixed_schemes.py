"""CK306, CK308, CK305 and lint of checkpoints with two formats, and what two configs of one say differently."""

import json

import pytest
import torch
from mutations.edits import edit_config
from support import floats
from support.messages import text_with
from support.models import edit, tensors
from support.quantized import group_config, int4, rewrite, write

from ckptkit.quant.formats.modelopt import differing_configs
from ckptkit.quant.ignore.lint import lint
from ckptkit.verify.run import verify

ATTENTION, MLP = "model.layers.3.self_attn", "model.layers.4.mlp"
PACKED, SCHEME = "pack-quantized", {"num_bits": 4, "symmetric": True, "strategy": "group", "group_size": 32}


def packed(plain, path, others):
    """qwen2-untied in INT4 with groups of 32; `others`: what is another way, by module, each in a group of its own."""
    usual = [name.removesuffix(".weight") for name in tensors(plain) if name.endswith("_proj.weight")]

    def store(name, weight):
        if (module := name.removesuffix(".weight")) not in usual:
            return {name: weight}
        scheme = {key: one for key, one in (SCHEME | others.get(module, {})).items() if one is not None}
        return {name + ending: part for ending, part in int4(scheme.pop("num_bits"), **scheme)(weight)[0].items()}

    groups = [([one for one in usual if one not in others], {})] + [([module], one) for module, one in others.items()]
    content = group_config(
        PACKED,
        *(
            {"targets": targets, "weights": {"type": "int", "dynamic": False, **SCHEME, **scheme}, "format": PACKED}
            for targets, scheme in groups
        ),
        ignore=["lm_head", "model.embed_tokens"],
    )
    rewrite(plain, path, store, lambda config: config | {"quantization_config": content})
    return path


def by_source(path, plain):
    return [one for one in verify(path, source=plain).findings if one.code == "CK305"]


EIGHT, WIDE, SHIFTED = {"num_bits": 8}, {"group_size": 64}, {"symmetric": False}
ROWS = {"strategy": "channel", "group_size": None}
MIXED = {
    "gate in 8 bits": ({f"{MLP}.gate_proj": EIGHT}, "INT8, groups of 32"),
    "k and v in 8 bits": ({f"{ATTENTION}.{part}_proj": EIGHT for part in "kv"}, "INT4, groups of 32"),
    "up in groups of 64 of 8 bits": ({f"{MLP}.up_proj": EIGHT | WIDE}, "INT8, groups of 64"),
    "v with a scale a row": ({f"{ATTENTION}.v_proj": ROWS}, "INT4, one scale"),
    "k with zero points": ({f"{ATTENTION}.k_proj": SHIFTED}, "zero points"),
}


@pytest.mark.parametrize("what", MIXED)
def test_a_fused_layer_packed_in_two_ways_is_found(what, releases, tmp_path, alone):
    others, said = MIXED[what]
    path = packed(releases("qwen2-untied"), tmp_path / "mixed", others)
    (found,) = alone("CK306", path)[1]
    assert str(found.tensor).startswith(MLP if MLP in min(others) else ATTENTION)
    assert said in f"{found.actual} {found.expected}"
    assert alone("CK306", path, readers=("vllm",))[1] != []
    assert alone("CK306", path, readers=("transformers",))[1] == []  # which holds each layer by itself
    assert "CK303" not in {one.code for one in verify(path).findings}
    (linted,) = [one for one in lint(path, readers=("vllm",)).findings if one.kind == "mixed layer"]
    assert linted.severity == "error"


SOUND = {
    "fused layers in 8 bits": {f"{MLP}.{part}_proj": EIGHT for part in ("gate", "up")}
    | {f"{ATTENTION}.{part}_proj": EIGHT for part in "qkv"},
    "single layers": {f"{MLP}.down_proj": SHIFTED, f"{ATTENTION}.o_proj": ROWS},
    "a fused layer in wide groups": {f"{ATTENTION}.{part}_proj": WIDE for part in "qkv"},
}


@pytest.mark.parametrize("what", SOUND)
def test_layers_packed_in_ways_of_their_own_are_sound(what, releases, tmp_path):
    plain = releases("qwen2-untied")
    path = packed(plain, tmp_path / "mixed", SOUND[what])
    report = verify(path, source=plain, readers=("vllm",))
    assert (report.status, [str(one) for one in report.findings if one.severity == "error"]) == ("passed", [])
    compared = next(one for one in report.checks if one.code == "CK305")
    assert (compared.status, compared.tensors_compared) == ("passed", 84)
    assert [one.kind for one in lint(path, readers=("vllm",)).findings if one.severity == "error"] == []


def test_weights_of_8_bits_that_are_not_the_sources_are_found(releases, tmp_path, alone):
    plain, module = releases("qwen2-untied"), f"{MLP}.down_proj"
    path = packed(plain, tmp_path / "mixed", {module: EIGHT})
    edit(path, f"{module}.weight_scale", tensors(path)[f"{module}.weight_scale"] * 1.25)
    assert [one.tensor for one in by_source(path, plain)] == [f"{module}.weight"]


def mxfp8(module, weight, off):
    """OCP's own rule: the power of two below the largest weight is 256 steps, and what is above 448 is cut.

    `off`: how much larger the exponents are.
    """
    groups = weight.float().unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=1e-30))) - 8 + off
    codes = (groups / torch.exp2(exponents).unsqueeze(-1)).clamp(-448, 448).flatten(-2).to(torch.float8_e4m3fn)
    return {f"{module}.weight": codes, f"{module}.weight_scale_inv": (exponents + 127).to(torch.uint8)}


@pytest.mark.parametrize(("off", "count"), [(0, 0), (1, 0), (-1, 84)])
def test_mxfp8_of_ocps_rule_is_within_half_a_step(off, count, releases, tmp_path):
    """One exponent more, as a quantizer that rounds up has it, only loses range; with fewer, weights are cut."""
    plain, content = releases("qwen2-untied"), {"quantization_config": {"quant_method": "mxfp8"}}
    spelling = floats.Spelling(lambda module, weight: mxfp8(module, weight, off), content, columns=32)
    path = floats.write(plain, tmp_path / "release" / "mxfp8", spelling)
    assert sum(one.count for one in by_source(path, plain)) == count


OURS = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
FP8_CACHE = {"num_bits": 8, "type": "float", "dynamic": False}
THEIRS = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
# The quantization_config of config.json, what hf_quant_config.json has, and what differs.
TWO = {
    "cache there": (OURS, THEIRS | {"kv_cache_quant_algo": "FP8"}, {"kv_cache"}),
    "cache here": (OURS | {"kv_cache_scheme": FP8_CACHE}, THEIRS, {"kv_cache"}),
    "cache of 4 bits": (
        OURS | {"kv_cache_scheme": FP8_CACHE | {"num_bits": 4}},
        THEIRS | {"kv_cache_quant_algo": "FP8"},
        {"kv_cache"},
    ),
    "algorithm": (OURS, THEIRS | {"quant_algo": "FP8"}, {"quant_algo"}),
    "groups": (OURS, THEIRS | {"group_size": 32}, {"group_size"}),
    "groups inside": (
        {key: one for key, one in OURS.items() if key != "group_size"}
        | {"config_groups": {"group_0": {"weights": {"group_size": 32}}}},
        THEIRS,
        {"group_size"},
    ),
    "one module more": (OURS, THEIRS | {"exclude_modules": ["lm_head", "*gate"]}, {"ignore"}),
    "modules of their own": (
        OURS | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "FP8"}}},
        THEIRS | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "NVFP4"}}},
        {"quantized_layers"},
    ),
    "another method": ({"quant_method": "fp8"}, THEIRS, {"quant_method"}),
    "the same": (OURS | {"kv_cache_scheme": None}, THEIRS | {"kv_cache_quant_algo": None}, set()),
    "the same cache": (OURS | {"kv_cache_scheme": FP8_CACHE}, THEIRS | {"kv_cache_quant_algo": "FP8"}, set()),
    "another order": (OURS | {"ignore": ["a", "lm_head"]}, THEIRS | {"exclude_modules": ["lm_head", "a"]}, set()),
    "lower case": (OURS | {"quant_algo": "fp8_pb_wo"}, THEIRS | {"quant_algo": "FP8_PB_WO"}, set()),
}


def test_two_configs_of_one_checkpoint_are_compared(tmp_path):
    """ModelOpt writes hf_quant_config.json with a key `quantization`, and from 1.0 on as in config.json."""
    for what, (ours, theirs, differing) in TWO.items():
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": ours}))
        flat = {"quant_method": "modelopt", **theirs, "ignore": theirs["exclude_modules"]}
        for content in ({"quantization": theirs}, flat):
            (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}} | content))
            found = differing_configs(tmp_path)
            assert found.keys() == differing, what
            assert all("(config.json)" in one and "(hf_quant_config.json)" in one for one in found.values()), what


def test_a_cache_in_one_config_of_two_is_an_error(releases, tmp_path, edit_json, alone):
    path = floats.write(releases("qwen2-untied"), tmp_path / "release" / "nvfp4", floats.SPELLINGS["nvfp4-modelopt"])
    file = path / "hf_quant_config.json"
    beside = json.loads(file.read_text())["quantization"]
    ours = {"quant_method": "modelopt"} | {key: one for key, one in beside.items() if key != "exclude_modules"}
    edit_config(path, quantization_config=ours | {"ignore": beside["exclude_modules"]})
    assert alone("CK303", path)[1] == []
    edit_json(file, quantization=beside | {"kv_cache_quant_algo": "FP8"})
    (found,) = alone("CK303", path)[1]
    assert (found.severity, found.file) == ("error", str(file))
    assert found.actual == text_with("kv_cache_scheme (config.json) kv_cache_quant_algo 'FP8' (hf_quant_config.json)")
    linted = [(one.kind, one.severity) for one in lint(path).findings if one.severity != "note"]
    assert linted == [("two configs", "error")]
    edit_config(path, quantization_config=None)
    assert alone("CK303", path)[1] == []  # engines then read the second alone
    (found,) = alone("CK303", path, readers=("transformers",))[1]
    assert "codes" in found.actual


def test_int8_of_llm_compressor_is_named_and_not_judged(releases, tmp_path):
    def by_row(weight):
        scale = weight.float().abs().amax(-1, keepdim=True) / 127
        return {"": (weight.float() / scale).round().to(torch.int8), "_scale": scale.bfloat16()}, weight

    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": weights | {"dynamic": True}}
    content = {"quantization_config": group_config("int-quantized", group)}
    path, plain = tmp_path / "w8a8", releases("qwen2-untied")
    write(plain, path, lambda name: name.endswith("_proj.weight"), by_row, lambda config: config | content)
    report = verify(path)
    assert (report.status, [one for one in report.findings if one.severity == "error"]) == ("inconclusive", [])
    assert any("INT8" in reason for reason in report.reasons)
