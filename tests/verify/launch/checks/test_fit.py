"""CK722's words on FP8 blocks, against SGLang's and vLLM's own layers; CK747 of what slime and miles send."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.check_examples import hold_example
from support.launch_scripts import write_config, write_launch
from support.processes import run_logged

from converters.config.dims import Mla, ModelDims
from converters.planner import dims_of
from verify.launch.checks.fit import engine_fit
from verify.launch.preflight import preflight
from verify.launch.stacks.sizes import Cut
from verify.report import Finding
from verify.witnesses.process.interpreter import python_of

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


def of_ours(case: Mapping[str, Any], engine: str, base: ModelDims) -> list[str]:
    """What CK722 says of a case."""
    dims, given = dict(case["dims"]), base
    if "kv_rank" in dims:
        parts = [dims.pop(name) for name in ("kv_rank", "nope", "rope", "value")]
        given = replace(base, mla=Mla(64, *parts))
    cut = Cut("", engine, case["ranks"], "", attention=case["attention"], dense=case["ranks"])
    issues = engine_fit(replace(given, **dims), {"quantization_config": FP8}, cut)
    return [issue.expected for issue in issues if "FP8 block" in issue.expected]


def of_engine(cases: Sequence[Mapping[str, Any]], engine: str, program: Path | str, root: Path) -> list[list[str]]:
    """What the engine's own layers refuse of them."""
    file = root / "cases.json"
    file.write_text(json.dumps(cases))
    ended_well = run_logged(root / "log", "support.fp8_cuts", engine, file, program=program)
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
def test_what_is_refused_of_a_cut_is_what_the_layers_of_the_engine_refuse(
    engine: str, both: ModelDims, tmp_path: Path
) -> None:
    cases = drawn(engine)
    seen = set[str]()
    for case, refused in zip(cases, of_engine(cases, engine, python_of(engine, {}), tmp_path), strict=True):
        findings = of_ours(case, engine, both)
        names = [next(layers for words, layers in WORDS.items() if words in one) for one in findings]
        assert all(layers & set(refused) for layers in names), (case, findings, refused)
        assert set(refused) <= set().union(*names), (case, findings, refused)
        seen |= set(refused)
    expected = {"down_proj", "q_b_proj", "kv_b_proj", "o_proj", "experts"}
    assert seen == expected | ({"gate_up_proj", "qkv_proj"} if engine == "sglang" else set())


def launched(folder: Path, quantization: Mapping[str, Any] | None, change: Callable[[str], str] = str) -> list[Finding]:
    """What CK722 and CK747 find of a launch whose engine serves a Qwen3 mixture of experts quantized so."""
    root = write_config(folder / "hf", "qwen3_moe")
    config = json.loads((root / "config.json").read_text())
    config |= {} if quantization is None else {"quantization_config": dict(quantization)}
    (root / "config.json").write_text(json.dumps(config))
    report = preflight(script=write_launch(folder, "qwen3_moe", root, change=change))
    return [one for one in report.findings if one.code in ("CK722", "CK747")]


def wide(text: str) -> str:
    """Experts cut by four tensor parallel ranks, where the launch spreads them over eight."""
    tp = text.replace("--rollout-num-gpus-per-engine 8", "--rollout-num-gpus-per-engine 4")
    return tp.replace("--sglang-ep-size 8", "")


FORMATS = [
    ({**FP8, "activation_scheme": "dynamic", "fmt": "e4m3"}, []),
    ({**FP8, "activation_scheme": "static"}, ["activation_scheme = dynamic, which slime and miles assert"]),
    (FP8, ["activation_scheme = dynamic, which slime and miles assert"]),
    (
        {**FP8, "activation_scheme": "dynamic", "fmt": "e5m2"},
        ["fmt = e4m3, which slime and miles assert"],
    ),
    ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, []),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, []),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, ["a quant_method that slime or miles packs"]),
    ({"quant_method": "mxfp4"}, ["a quant_method that slime or miles packs"]),
]


@pytest.mark.parametrize(("quantization", "expected"), FORMATS)
def test_a_format_that_the_trainer_cannot_send_is_found(
    quantization: Mapping[str, Any], expected: list[str], tmp_path: Path
) -> None:
    found = [one for one in launched(tmp_path, quantization) if one.code == "CK747"]
    assert [one.expected.split(":")[0] for one in found] == expected
    assert all((one.severity == "warning") == (quantization["quant_method"] == "mxfp4") for one in found)


DYNAMIC = {**FP8, "activation_scheme": "dynamic"}
# --sglang-quantization, the checkpoint, and what is found of the two.
OPTIONS: list[tuple[str, Mapping[str, Any] | None, str | None]] = [
    ("fp8", DYNAMIC, None),
    ("nvfp4_online", DYNAMIC, None),
    ("modelopt_fp4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, None),
    ("w8a8_fp8", {"quant_method": "compressed-tensors"}, None),
    ("w8a8_fp8", DYNAMIC, "error"),
    ("mxfp8", DYNAMIC, "error"),
    ("fp8", {"quant_method": "compressed-tensors"}, "error"),
    ("fp8", None, "warning"),
]


@pytest.mark.parametrize(("option", "quantization", "severity"), OPTIONS)
def test_an_option_of_the_engine_that_contradicts_the_checkpoint_is_found(
    option: str, quantization: Mapping[str, Any] | None, severity: str | None, tmp_path: Path
) -> None:
    added = f"--sglang-quantization {option} --sglang-ep-size 8"
    given = launched(tmp_path, quantization, lambda text: text.replace("--sglang-ep-size 8", added))
    found = [one for one in given if one.code == "CK747"]
    assert [one.severity for one in found] == ([] if severity is None else [severity])
    assert all("--sglang-quantization" in one.expected for one in found)
    assert [one for one in launched(tmp_path / "twin", quantization) if one.code == "CK747"] == []


@pytest.mark.sglang
@pytest.mark.parametrize(("option", "quantization", "severity"), [one for one in OPTIONS if one[1] is not None])
def test_sglang_stops_at_an_option_that_contradicts_the_checkpoint(
    option: str, quantization: Mapping[str, Any], severity: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.configs.model_config import ModelConfig

        config = ModelConfig.__new__(ModelConfig)
        config.quantization, config.is_draft_model = option, False
        monkeypatch.setattr(ModelConfig, "_parse_quant_hf_config", lambda self: dict(quantization))
        monkeypatch.setattr(ModelConfig, "_find_quant_modelslim_config", lambda self: None)
        stops = pytest.raises(ValueError, match="does not match") if severity == "error" else nullcontext()
        with stops:
            config._verify_quantization()


def test_example_of_the_site_is_what_is_found(tmp_path: Path) -> None:
    (found,) = launched(tmp_path, {"quant_method": "modelopt", "quant_algo": "FP8"})
    hold_example("CK747", found)


def test_layers_that_the_list_leaves_out_are_not_held_against_blocks(tmp_path: Path) -> None:
    """Experts of 768 over four ranks are 192 rows each, a block and a half."""
    right = {**FP8, "activation_scheme": "dynamic"}
    (found,) = launched(tmp_path / "a", right, wide)
    assert found.actual == "moe_intermediate_size = 768, 192 a rank"
    layers = [f"model.layers.{layer}.mlp.experts" for layer in range(48)]
    assert launched(tmp_path / "b", {**right, "modules_to_not_convert": layers}, wide) == []
    assert len(launched(tmp_path / "c", {**right, "modules_to_not_convert": layers[1:]}, wide)) == 1
    assert len(launched(tmp_path / "d", {**right, "modules_to_not_convert": ["lm_head", "mlp.gate"]}, wide)) == 1
