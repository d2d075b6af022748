"""CK722's words on FP8 blocks, against SGLang's and vLLM's own layers."""

import json
import random
from dataclasses import replace

import pytest
from support.forking import run_in_engine
from support.launch_scripts import quantized_launch, write_config
from support.messages import text_with

from ckptkit.converters.config.dims import Mla
from ckptkit.converters.planner import dims_of
from ckptkit.verify.launch.checks.gpus import engine_fit
from ckptkit.verify.launch.preflight import preflight
from ckptkit.verify.launch.stacks.sizes import ModelSplit

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
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


def drawn(engine):
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


def of_ours(case, engine, base):
    dims, given = dict(case["dims"]), base
    if "kv_rank" in dims:
        parts = [dims.pop(name) for name in ("kv_rank", "nope", "rope", "value")]
        given = replace(base, mla=Mla(64, *parts))
    cut = ModelSplit("", engine, case["ranks"], "", attention=case["attention"], dense=case["ranks"])
    issues = engine_fit(replace(given, **dims), {"quantization_config": FP8}, cut)
    return [issue.expected for issue in issues if " block of " in issue.expected]


def of_engine(cases, engine, root):
    file = root / "cases.json"
    file.write_text(json.dumps(cases))
    ended_well = run_in_engine(engine, root / "log", "support.fp8_cuts", engine, file)
    assert ended_well, (root / "log").read_text()[-3000:]
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    root = write_config(tmp_path_factory.mktemp("hf"), "qwen3_moe")
    dims = dims_of(json.loads((root / "config.json").read_text()))
    return replace(dims, dense_layers=(0,))


ENGINES = [pytest.param("sglang", marks=pytest.mark.sglang), pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_refused_of_a_cut_is_what_the_layers_of_the_engine_refuse(engine, both, tmp_path):
    cases, seen = drawn(engine), set[str]()
    for case, refused in zip(cases, of_engine(cases, engine, tmp_path), strict=True):
        findings = of_ours(case, engine, both)
        names = [next(layers for words, layers in WORDS.items() if words in one) for one in findings]
        assert all(layers & set(refused) for layers in names), (case, findings, refused)
        assert set(refused) <= set().union(*names), (case, findings, refused)
        seen |= set(refused)
    expected = {"down_proj", "q_b_proj", "kv_b_proj", "o_proj", "experts"}
    assert seen == expected | ({"gate_up_proj", "qkv_proj"} if engine == "sglang" else set())


def wide(text):
    tp = text.replace("--rollout-num-gpus-per-engine 8", "--rollout-num-gpus-per-engine 4")
    return tp.replace("--sglang-ep-size 8", "")


@pytest.mark.parametrize(
    ("rank", "engine", "severity"),
    [
        # What vLLM 0.33's own function makes of them beside a hidden size of 2048: blocks of 64, of 32, none.
        (192, "vllm", "warning"),
        (96, "vllm", "warning"),
        (176, "vllm", "error"),
        (192, "sglang", "error"),
    ],
)
def test_experts_that_vllm_033_splits_into_finer_blocks_are_a_warning(rank, engine, severity, both):
    dims = replace(both, dense_layers=(), expert_ffn=4 * rank)
    issues = engine_fit(dims, {"quantization_config": FP8}, ModelSplit("", engine, 4, "", dense=4))
    assert [one.severity for one in issues if "moe_intermediate_size" in one.expected] == [severity]


@pytest.mark.parametrize(
    ("vocabulary", "cut", "warned"),
    [
        (1000, ModelSplit("", "sglang", 3, ""), True),  # 1024 rows
        (1000, ModelSplit("", "sglang", 4, ""), False),
        (1100, ModelSplit("", "sglang", 3, ""), False),  # 1152 rows
        (1000, ModelSplit("", "vllm", 3, ""), False),
        (1000, ModelSplit("", "sglang", 12, "", attention=4), False),
    ],
)
def test_sglang_pads_a_vocabulary_to_a_multiple_of_64(vocabulary, cut, warned, both):
    issues = engine_fit(replace(both, heads=12, groups=12, vocab=vocabulary), {}, cut)
    found = [one.severity for one in issues if "vocab_size" in one.actual]
    assert found == ["warning"] * warned


def launched(folder, quantization):
    report = preflight(script=quantized_launch(folder, "qwen3_moe", quantization, wide))
    return [one for one in report.findings if one.code == "CK722"]


def test_layers_that_the_list_leaves_out_are_not_held_against_blocks(tmp_path):
    """Experts of 768 over four ranks are 192 rows each, a block and a half."""
    right = {**FP8, "activation_scheme": "dynamic"}
    (found,) = launched(tmp_path / "a", right)
    assert found.actual == text_with("moe_intermediate_size = 768 192")
    layers = [f"model.layers.{layer}.mlp.experts" for layer in range(48)]
    assert launched(tmp_path / "b", {**right, "modules_to_not_convert": layers}) == []
    assert len(launched(tmp_path / "c", {**right, "modules_to_not_convert": layers[1:]})) == 1
    assert len(launched(tmp_path / "d", {**right, "modules_to_not_convert": ["lm_head", "mlp.gate"]})) == 1
