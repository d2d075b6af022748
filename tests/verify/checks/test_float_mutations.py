"""What `verify` says of weights in FP8, MXFP8, MXFP4 and NVFP4 that are broken: each fault by its number and twin."""

import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from mutations import floats as faults
from mutations.edits import edit_config, edit_json, names, replace, tensor
from support import floats, quantized
from support.installed import release
from support.nightly import daily

MODELS = ("qwen2-untied", "qwen3_moe", "deepseek_v3")


@pytest.fixture(scope="module")
def stored(releases, tmp_path_factory):
    """`stored(model, spelling)`: the model's release so quantized, made once. Not to be written to."""
    root, made = tmp_path_factory.mktemp("floats"), dict[tuple[str, str], Path]()
    is_fused = re.compile(r".+mlp\.experts\.(gate_up|down)_proj").fullmatch

    def find(model, spelling):
        if (model, spelling) not in made:
            target = root / f"{model}-{spelling}"
            if spelling == "gpt-oss":
                edit = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}
                quantized.write(releases(model), target, is_fused, quantized.mxfp4, lambda config: config | edit)
            else:
                floats.write(releases(model), target, floats.SPELLINGS[spelling])
            made[model, spelling] = target
        return made[model, spelling]

    return find


@dataclass(frozen=True)
class Mutation:
    number: int
    damage: Callable[[Path], str]
    spelling: str
    code: str
    words: str
    readers: tuple[str, ...] | None = None
    severity: str = "error"
    models: tuple[str, ...] = MODELS


DENSE, MOE, VLLM = ("qwen2-untied",), ("deepseek_v3",), ("vllm",)
WEIGHTS_ONLY = {"quant_algo": "W4A16_NVFP4"}
MUTATIONS = (
    Mutation(1, faults.scale_dropped, "fp8", "CK303", "FP8 weights without a scale"),
    Mutation(2, faults.scale_listed_alone, "fp8", "CK104", "weight_scale_inv"),
    Mutation(3, faults.inputs_of_two_dropped, "nvfp4-modelopt", "CK303", "have no"),
    Mutation(4, faults.half_the_scales, "nvfp4-modelopt", "CK303", "packed"),
    Mutation(5, faults.bytes_as_numbers, "fp8-ue8m0", "CK308", "far larger"),
    Mutation(6, faults.exponents_unannounced, "fp8-ue8m0", "CK303", "119.0"),
    Mutation(7, faults.reciprocal, "fp8", "CK308", "far larger"),
    Mutation(7, faults.reciprocal, "fp8", "CK305", "half steps"),
    Mutation(8, faults.gates_scale, "nvfp4-modelopt", "CK306", "by up to 1.7 times"),
    Mutation(8, faults.gates_scale, "nvfp4-modelopt", "CK305", "half steps"),
    Mutation(9, faults.zero_block_as_miles_writes_it, "fp8", "CK304", "1 blocks"),
    Mutation(9, faults.zero_block_as_miles_writes_it, "fp8", "CK204", "NaN"),
    Mutation(10, faults.nan_scale, "nvfp4-modelopt", "CK304", "NaN"),
    Mutation(11, faults.label_of_powers, "fp8", "CK304", "scale_fmt ue8m0"),
    Mutation(12, faults.codes_of_the_unrounded_scale, "fp8-ue8m0", "CK305", "half steps"),
    Mutation(13, faults.router_in_fp8, "fp8", "CK301", "stored in FP8"),
    Mutation(14, faults.gate_alone, "fp8", "CK306", "unquantized"),
    Mutation(15, faults.layers_by_a_name_that_begins_others, "nvfp4-weights", "CK302", "{10..11}", VLLM, models=DENSE),
    Mutation(16, faults.one_expert_listed, "fp8", "CK302", "SGLang 0.5.16 would leave unpacked", models=MOE),
    Mutation(16, faults.one_expert_listed, "fp8", "CK302", "vLLM 0.26 would leave unpacked", VLLM, models=MOE),
    Mutation(17, faults.nibbles_swapped, "nvfp4-modelopt", "CK305", "half steps"),
    Mutation(17, faults.nibbles_swapped, "mxfp4-quark", "CK305", "half steps"),
    Mutation(17, faults.nibbles_of_fused_experts, "gpt-oss", "CK305", "half steps", models=("gpt_oss",)),
    Mutation(18, faults.scales_turned, "fp8", "CK305", "half steps"),
    Mutation(20, faults.scales_of_another_layer, "fp8", "CK305", "half steps"),
    Mutation(20, faults.scales_of_another_layer, "fp8", "CK304", "codes"),
    Mutation(20, faults.scale_of_the_query, "fp8", "CK305", "half steps", models=("qwen3_moe",)),
    Mutation(21, faults.second_config_of_32, "nvfp4-modelopt", "CK303", "group_size is 32 (hf_quant_config.json)"),
    Mutation(22, faults.packed_for_a_kernel, "fp8-ue8m0", "CK303", "int32"),
    Mutation(23, faults.multiplier_for_divisor, "nvfp4-compressed", "CK308", "far larger"),
    Mutation(24, faults.layer_listed_under_a_wrapper, "fp8", "CK302", "would pack", models=DENSE),
    Mutation(25, faults.draft_layer_unlisted, "fp8", "CK302", "would pack", models=MOE),
    Mutation(26, faults.global_scale_dropped, "nvfp4-compressed", "CK303", "without the tensor's scale"),
    Mutation(27, faults.fnuz_bits, "fp8", "CK305", "half steps"),
    Mutation(27, faults.fnuz_dtype, "fp8", "CK102", "FP8 of AMD's MI300"),
    Mutation(28, faults.gate_and_up_interleaved, "nvfp4-modelopt", "CK305", "half steps"),
    Mutation(29, faults.size_in_rows, "fp8", "CK106", "rows", severity="warning"),
    Mutation(30, faults.pairs_as_f4, "nvfp4-modelopt", "CK102", "export"),
    # Without a number of their own: an export of FP8 under NVFP4's config, and one that drops a dimension.
    Mutation(0, faults.fp8_for_nvfp4, "nvfp4-modelopt", "CK303", "float8_e4m3fn"),
    Mutation(0, faults.scale_of_one_dimension_less, "nvfp4-modelopt", "CK303", "block or group"),
)
FIRST = {one.damage: one for one in reversed(MUTATIONS)}
CASES = [(one, model) for one in MUTATIONS for model in one.models]
DAILY = [(one, one.models[min(one.number % 2, len(one.models) - 1)]) for one in FIRST.values()]


def said(finding):
    return f"{finding.tensor} {finding.expected} {finding.actual} {finding.hint}"


@pytest.mark.parametrize(
    "case", daily(CASES, DAILY), ids=lambda one: f"{one[0].number}-{one[0].damage.__name__}-{one[1]}"
)
def test_mutation_is_found_and_its_twin_is_silent(case, stored, releases, copy_of, alone):
    mutation, model = case
    how = {"source_path": releases(model)} if mutation.code == "CK305" else {}
    how |= {"readers": mutation.readers} if mutation.readers else {}
    assert [said(finding) for finding in alone(mutation.code, stored(model, mutation.spelling), **how)[1]] == []
    path = copy_of(stored(model, mutation.spelling))
    name = mutation.damage(path)
    result, findings = alone(mutation.code, path, **how)
    texts = [said(finding) for finding in findings]
    assert any(mutation.words in text for text in texts), (name, texts)
    assert {finding.severity for finding in findings} == {mutation.severity}
    if len(texts) == 1 and "{" not in texts[0]:
        assert name.rpartition(".")[0] in texts[0]
    assert (result and result.status) == ("passed" if mutation.severity == "warning" else "failed")


def test_nvfp4_without_any_scale_of_activations_is_an_error_whoever_reads(stored, copy_of, alone):
    path = copy_of(stored("qwen3_moe", "nvfp4-modelopt"))
    replace(path, {}, names(path, "input_scale"))
    for readers in (None, ("sglang",), ("slime", "vllm")):
        assert alone("CK303", stored("qwen3_moe", "nvfp4-modelopt"), readers=readers)[1] == []
        findings = alone("CK303", path, readers=readers)[1]
        assert {("no input_scale" in finding.actual, finding.severity) for finding in findings} == {(True, "error")}
    edit_json(path / "hf_quant_config.json", lambda content: content["quantization"].update(WEIGHTS_ONLY))
    assert alone("CK303", path)[1] == []


@pytest.mark.sglang
def test_sglang_allocates_the_scale_of_activations_without_a_value():
    """Why it is an error: SGLang 0.5.16 writes no number there; 0.5.23 begins with 1.0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4LinearMethod
    source = inspect.getsource(ModelOptFp4LinearMethod.create_weights)
    made = re.search(r"input_scale = _make_per_tensor_scale_parameter\((.*?)\n        \)", source, re.DOTALL)
    assert ("fill_value=1.0" in made[1]) == (release("sglang") >= (0, 5, 23))


@pytest.mark.sglang
@pytest.mark.parametrize(("exponent", "kept"), [(-14, 0.5), (-16, 0.0)])
def test_sglangs_own_cast_of_mxfp4_to_fp8_rounds_what_blocks_do_not_reach(exponent, kept):
    """Why fault 19 is a warning: a reader does the same, silently."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.layers.quantization.fp8 import cast_e2m1fn_to_e4m3fn

        codes = torch.zeros(128, 64, dtype=torch.int8)
        codes[0, 0], codes[1, 0] = 7, 1  # 6 and 0.5
        powers = torch.full((128, 4), 127, dtype=torch.uint8)
        powers[1, 0] = 127 + exponent
        made, scale = cast_e2m1fn_to_e4m3fn(codes, powers.view(torch.float8_e8m0fnu))
    assert made[0, 0].float() * scale[0, 0].float() == 6
    assert made[1, 0].float() * scale[0, 0].float() == kept * 2.0**exponent


def test_a_layer_cast_to_bf16_in_an_fp8_model_is_the_lists_fault(stored, copy_of, alone):
    """CK107 lets any layer be left out of FP8; CK302 says who would build it in FP8, until the list has it."""
    path = copy_of(stored("qwen3_moe", "fp8"))
    modules = [name.removesuffix(".weight_scale_inv") for name in names(path, "layers.5.self_attn") if "_inv" in name]
    assert len(modules) == 4
    plain = {f"{module}.weight": tensor(path, f"{module}.weight").to(torch.bfloat16) for module in modules}
    replace(path, plain, [f"{module}.weight_scale_inv" for module in modules])
    assert alone("CK107", path)[1] == []
    findings = alone("CK302", path)[1]
    assert {finding.severity for finding in findings} == {"error"}
    assert any("SGLang 0.5.16 would pack model.layers.5.self_attn" in finding.actual for finding in findings)
    assert all("--fix" in finding.hint for finding in findings)
    key = "ignored_layers"
    edit_json(path / "config.json", lambda config: config["quantization_config"].setdefault(key, []).extend(modules))
    assert alone("CK302", path)[1] == []


def test_scales_of_activations_that_are_all_one_are_a_warning(stored, copy_of, alone):
    path = copy_of(stored("qwen3_moe", "nvfp4-modelopt"))
    replace(path, {name: torch.tensor(1.0) for name in names(path, "input_scale")})
    findings = alone("CK304", path)[1]
    assert {("1.0" in finding.actual, finding.severity) for finding in findings} == {(True, "warning")}
    edit_json(path / "hf_quant_config.json", lambda content: content["quantization"].update(WEIGHTS_ONLY))
    assert alone("CK304", path)[1] == []


def test_parts_of_a_model_that_is_not_known_are_judged(stored, copy_of, alone):
    """Headers need no family."""
    path = copy_of(stored("qwen3_moe", "nvfp4-modelopt"))
    edit_config(path, model_type="model_of_tomorrow", architectures=["ModelOfTomorrow"])
    assert alone("CK303", path)[1] == []
    faults.half_the_scales(path)
    (finding,) = alone("CK303", path)[1]
    assert "packed" in finding.hint
