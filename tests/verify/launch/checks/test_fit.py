"""CK722's words on FP8 blocks, against SGLang's and vLLM's own layers."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.forking import run_in_engine
from support.launch_scripts import quantized_launch, write_config

from converters.config.dims import Mla, ModelDims
from converters.planner import dims_of
from verify.launch.checks.gpus import engine_fit
from verify.launch.preflight import preflight
from verify.launch.stacks.sizes import Cut
from verify.report import Finding

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
PACKED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
    "ignore": ["lm_head", r"re:.*\.mlp\.gate$"],
}
# What CK722 calls the side of a layer, by words of its finding, and the layers of an engine that it stands for.
WORDS = {
    "moe_intermediate_size": {"experts"},
    "intermediate_size": {"gate_up_proj", "down_proj"},
    "num_key_value_heads": {"qkv_proj"},
    "x head_dim": {"qkv_proj", "o_proj"},
    "qk_rope_head_dim": {"q_b_proj"},
    "+ v_head_dim": {"kv_b_proj"},
    "x v_head_dim": {"o_proj"},
}


def drawn(engine: str) -> list[dict[str, Any]]:
    """Sizes of models and engines, half of them with latent attention. In vLLM all ranks share attention."""
    draw, cases = random.Random(7), []
    while len(cases) < 150:
        ranks = draw.choice((2, 4, 8))
        attention = ranks // draw.choice((1, 1, 1, 2) if engine == "sglang" else (1,))
        heads = attention * draw.choice((1, 2, 3, 4))
        dims = {"heads": heads, "ffn": ranks * draw.choice((96, 128, 192, 256)), "groups": heads}
        dims["expert_ffn"] = ranks * draw.choice((64, 128, 192, 384))
        if len(cases) % 2:
            dims |= {"kv_rank": 64, **{name: draw.choice((32, 64, 96, 128)) for name in ("nope", "rope", "value")}}
        else:
            dims |= {"groups": draw.choice((1, 2, heads)), "head_dim": draw.choice((32, 64, 96, 128, 256))}
            if heads % dims["groups"] or (attention % dims["groups"] and dims["groups"] % attention):
                continue
        cases.append({"ranks": ranks, "attention": attention, "dims": dims})
    return cases


def of_ours(case: Mapping[str, Any], engine: str, base: ModelDims, stated: Mapping[str, Any]) -> list[str]:
    """What CK722 says of a case."""
    dims, given = dict(case["dims"]), base
    if "kv_rank" in dims:
        parts = [dims.pop(name) for name in ("kv_rank", "nope", "rope", "value")]
        given = replace(base, mla=Mla(64, *parts))
    cut = Cut("", engine, case["ranks"], "", attention=case["attention"], dense=case["ranks"])
    issues = engine_fit(replace(given, **dims), {"quantization_config": stated}, cut)
    return [issue.expected for issue in issues if " block of " in issue.expected]


def of_engine(cases: Sequence[Mapping[str, Any]], engine: str, root: Path, form: str) -> list[list[str]]:
    """What the engine's own layers refuse of them."""
    file = root / "cases.json"
    file.write_text(json.dumps(cases))
    ended_well = run_in_engine(engine, root / "log", "support.fp8_cuts", engine, file, *form.split())
    assert ended_well, (root / "log").read_text()[-3000:]
    found: list[list[str]] = json.loads(file.read_text())
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> ModelDims:
    """A model with plain layers and layers of experts."""
    root = write_config(tmp_path_factory.mktemp("hf"), "qwen3_moe")
    dims = dims_of(json.loads((root / "config.json").read_text()))
    return replace(dims, dense_layers=(0,))


ENGINES = [pytest.param("sglang", marks=pytest.mark.sglang), pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("stated", [FP8, PACKED], ids=["fp8", "compressed-tensors"])
def test_what_is_refused_of_a_cut_is_what_the_layers_of_the_engine_refuse(
    stated: Mapping[str, Any], engine: str, both: ModelDims, tmp_path: Path
) -> None:
    cases, form = drawn(engine), "packed" if stated is PACKED else ""
    seen = set[str]()
    for case, refused in zip(cases, of_engine(cases, engine, tmp_path, form), strict=True):
        findings = of_ours(case, engine, both, stated)
        names = [next(layers for words, layers in WORDS.items() if words in one) for one in findings]
        assert all(layers & set(refused) for layers in names), (case, findings, refused)
        assert set(refused) <= set().union(*names), (case, findings, refused)
        seen |= set(refused)
    expected = {"down_proj", "q_b_proj", "kv_b_proj", "o_proj", "experts"}
    assert seen == expected | ({"gate_up_proj", "qkv_proj"} if engine == "sglang" or form else set())


MXFP8 = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
NARROW = {
    "heads": {"heads": 4, "groups": 4, "head_dim": 40, "ffn": 4 * 64, "expert_ffn": 4 * 64},
    "dense": {"heads": 4, "groups": 4, "head_dim": 64, "ffn": 4 * 72, "expert_ffn": 4 * 64},
    "experts": {"heads": 4, "groups": 4, "head_dim": 64, "ffn": 4 * 64, "expert_ffn": 4 * 48},
    "none": {"heads": 4, "groups": 4, "head_dim": 64, "ffn": 4 * 64, "expert_ffn": 4 * 64},
}


@pytest.mark.sglang
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("stated", "form", "expected"),
    [
        (MXFP8, "mxfp8", [{"o_proj"}, {"down_proj"}, {"experts"}, set()]),
        (NVFP4, "nvfp4", [{"o_proj"}, {"down_proj"}, set(), set()]),
    ],
    ids=["mxfp8", "nvfp4"],
)
def test_cuts_through_groups_of_mxfp8_and_nvfp4_are_those_that_sglang_refuses(
    stated: Mapping[str, Any], form: str, expected: list[set[str]], both: ModelDims, tmp_path: Path
) -> None:
    """Of 4 ranks each has 40, 72, 48 or 64 inputs, which groups of 32, of 16 or all divide."""
    cases = [{"ranks": 4, "attention": 4, "dims": dims} for dims in NARROW.values()]
    refused = of_engine(cases, "sglang", tmp_path, form)
    assert [set(names) for names in refused] == expected
    ours = [of_ours(case, "sglang", both, stated) for case in cases]
    assert [bool(findings) for findings in ours] == [bool(names) for names in expected]
    assert all(f"{form.upper()} block of " in one for findings in ours for one in findings)


def test_layers_that_modelopt_leaves_out_are_not_held_against_groups(both: ModelDims) -> None:
    case = {"ranks": 4, "attention": 4, "dims": NARROW["dense"]}
    down = {"model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4"}}
    other = {"model.layers.0.self_attn.o_proj": {"quant_algo": "NVFP4"}}
    assert of_ours(case, "vllm", both, NVFP4) != []
    assert of_ours(case, "vllm", both, {**NVFP4, "ignore": ["model.layers.0.mlp"]}) == []
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    assert of_ours(case, "vllm", both, {**mixed, "quantized_layers": down}) != []
    assert of_ours(case, "vllm", both, {**mixed, "quantized_layers": other}) == []
    assert of_ours({**case, "dims": NARROW["heads"]}, "vllm", both, MXFP8) == []


def wide(text: str) -> str:
    """Experts cut by four tensor parallel ranks, where the launch spreads them over eight."""
    tp = text.replace("--rollout-num-gpus-per-engine 8", "--rollout-num-gpus-per-engine 4")
    return tp.replace("--sglang-ep-size 8", "")


@pytest.mark.parametrize(
    ("rank", "engine", "stated", "severity"),
    [
        # What vLLM 0.33's own function makes of them beside a hidden size of 2048: blocks of 64, of 32, none.
        (192, "vllm", FP8, "warning"),
        (96, "vllm", FP8, "warning"),
        (176, "vllm", FP8, "error"),
        (192, "vllm", PACKED, "error"),
        (192, "sglang", FP8, "error"),
    ],
)
def test_experts_that_vllm_033_splits_into_finer_blocks_are_a_warning(
    rank: int, engine: Any, stated: Mapping[str, Any], severity: str, both: ModelDims
) -> None:
    dims = replace(both, dense_layers=(), expert_ffn=4 * rank)
    issues = engine_fit(dims, {"quantization_config": stated}, Cut("", engine, 4, "", dense=4))
    assert [one.severity for one in issues if "moe_intermediate_size" in one.expected] == [severity]


@pytest.mark.parametrize(
    ("vocabulary", "cut", "warned"),
    [
        (1000, Cut("", "sglang", 3, ""), True),  # 1024 rows
        (1000, Cut("", "sglang", 4, ""), False),
        (1100, Cut("", "sglang", 3, ""), False),  # 1152 rows
        (1000, Cut("", "vllm", 3, ""), False),
        (1000, Cut("", "sglang", 12, "", attention=4), False),
    ],
)
def test_sglang_pads_a_vocabulary_to_a_multiple_of_64(vocabulary: int, cut: Cut, warned: bool, both: ModelDims) -> None:
    issues = engine_fit(replace(both, heads=12, groups=12, vocab=vocabulary), {}, cut)
    found = [one.severity for one in issues if "vocab_size" in one.expected]
    assert found == ["warning"] * warned


def launched(folder: Path, quantization: Mapping[str, Any]) -> list[Finding]:
    """What CK722 finds of a launch whose engine serves a Qwen3 mixture of experts quantized so."""
    report = preflight(script=quantized_launch(folder, "qwen3_moe", quantization, wide))
    return [one for one in report.findings if one.code == "CK722"]


def test_layers_that_the_list_leaves_out_are_not_held_against_blocks(tmp_path: Path) -> None:
    """Experts of 768 over four ranks are 192 rows each, a block and a half."""
    right = {**FP8, "activation_scheme": "dynamic"}
    (found,) = launched(tmp_path / "a", right)
    assert found.actual == "moe_intermediate_size = 768, 192 a rank"
    layers = [f"model.layers.{layer}.mlp.experts" for layer in range(48)]
    assert launched(tmp_path / "b", {**right, "modules_to_not_convert": layers}) == []
    assert len(launched(tmp_path / "c", {**right, "modules_to_not_convert": layers[1:]})) == 1
    assert len(launched(tmp_path / "d", {**right, "modules_to_not_convert": ["lm_head", "mlp.gate"]})) == 1
