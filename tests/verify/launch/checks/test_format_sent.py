"""CK747: formats that slime, miles and vime cannot send, and options that SGLang and vLLM themselves stop at."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.check_examples import hold_example
from support.launch_scripts import quantized_launch
from support.processes import run_logged

from verify.launch.preflight import preflight
from verify.report import Finding
from verify.witnesses.process.interpreter import python_of

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def launched(folder: Path, quantization: Mapping[str, Any] | None, change: Callable[[str], str] = str) -> list[Finding]:
    """What CK747 finds of a launch whose engine serves a Qwen3 mixture of experts quantized so."""
    report = preflight(script=quantized_launch(folder, "qwen3_moe", quantization, change))
    return [one for one in report.findings if one.code == "CK747"]


def with_vllm(option: str = "--vllm-enable-expert-parallel") -> Callable[[str], str]:
    """The same launch of vime."""
    return lambda text: text.replace("--sglang-ep-size 8", option)


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
    found = launched(tmp_path, quantization)
    assert [one.expected.split(":")[0] for one in found] == expected
    assert all((one.severity == "warning") == (quantization["quant_method"] == "mxfp4") for one in found)


DYNAMIC = {**FP8, "activation_scheme": "dynamic"}


def test_another_name_of_e4m3_is_to_be_written_anew_and_another_format_to_be_replaced(tmp_path: Path) -> None:
    hints = {
        fmt: [one.hint for one in launched(tmp_path / fmt, {**DYNAMIC, "fmt": fmt})]
        for fmt in ("e4m3", "float8_e4m3fn", "e5m2")
    }
    assert hints == {
        "e4m3": [],
        "float8_e4m3fn": ['write "fmt": "e4m3" into its quantization_config: the same format by another name'],
        "e5m2": ["give a checkpoint in block FP8 of e4m3"],
    }


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
    found = launched(tmp_path, quantization, lambda text: text.replace("--sglang-ep-size 8", added))
    assert [one.severity for one in found] == ([] if severity is None else [severity])
    assert all("--sglang-quantization" in one.expected for one in found)
    assert launched(tmp_path / "twin", quantization) == []


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


@pytest.mark.sglang
def test_sglangs_fp8_parameter_refuses_bf16_only_where_columns_are_cut() -> None:
    """Why BF16 sent to an engine in FP8 is an error: it stops there, and elsewhere takes weights for codes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.layers.parameter import ModelWeightParameter

        sent = torch.full((4, 4), 0.02, dtype=torch.bfloat16)

        def parameter() -> Any:
            codes = torch.zeros(4, 4, dtype=torch.float8_e4m3fn)
            return ModelWeightParameter(data=codes, input_dim=1, output_dim=0, weight_loader=lambda *given: None)

        with pytest.raises(ValueError, match="Downcasting not allowed"):
            parameter().load_column_parallel_weight(sent, tp_rank=0)
        for weight in (sent.to(torch.float8_e4m3fn), sent):
            found = parameter()
            found.load_row_parallel_weight(weight, tp_rank=0)
            assert torch.equal(found.data.float(), sent.to(torch.float8_e4m3fn).float())


def test_example_of_the_site_is_what_is_found(tmp_path: Path) -> None:
    (found,) = launched(tmp_path, {"quant_method": "modelopt", "quant_algo": "FP8"})
    hold_example("CK747", found)


INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
    "ignore": ["lm_head"],
}
MXFP8 = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


@pytest.mark.parametrize(
    ("quantization", "severities"),
    [(DYNAMIC, []), (INT4, []), (MXFP8, ["error"]), (MODELOPT, ["error"]), ({"quant_method": "mxfp4"}, ["warning"])],
)
def test_vime_sends_fp8_and_int4(quantization: Mapping[str, Any], severities: list[str], tmp_path: Path) -> None:
    """Source: vime 0696c9b, `megatron_to_hf/processors/__init__.py`, whose last line sends the BF16 tensors."""
    found = launched(tmp_path, quantization, with_vllm())
    assert [one.severity for one in found] == severities
    assert all(one.expected == "a quant_method that vime packs: compressed-tensors, fp8" for one in found)


# --vllm-quantization, the checkpoint, and whether vLLM stops. It puts its own method before the option for ModelOpt's.
OF_VLLM: list[tuple[str, Mapping[str, Any], bool]] = [
    *(("fp8", DYNAMIC, False), ("humming", DYNAMIC, False), ("deepseek_v4_fp8", DYNAMIC, False)),
    *(("fp8_per_block", DYNAMIC, True), ("mxfp8", DYNAMIC, True), ("compressed-tensors", DYNAMIC, True)),
    *(("compressed-tensors", INT4, False), ("humming", INT4, False), ("fp8", INT4, True), ("torchao", INT4, True)),
    *(("mxfp8", MXFP8, False), ("humming", MXFP8, False), ("fp8", MXFP8, True), ("modelopt_mxfp8", MXFP8, True)),
    *(("modelopt", MODELOPT, False), ("modelopt_fp4", MODELOPT, False), ("fp8", MODELOPT, False)),
]


@pytest.mark.parametrize(("option", "quantization", "stops"), OF_VLLM)
def test_an_option_of_vllm_that_contradicts_the_checkpoint_is_found(
    option: str, quantization: Mapping[str, Any], stops: bool, tmp_path: Path
) -> None:
    found = launched(tmp_path, quantization, with_vllm(f"--vllm-quantization {option}"))
    said = [one.actual for one in found if "--vllm-quantization" in one.expected]
    assert said == ([f"{option}: vLLM stops at its start"] if stops else [])


def test_vllm_packs_an_unquantized_checkpoint_by_itself(tmp_path: Path) -> None:
    assert launched(tmp_path, None, with_vllm("--vllm-quantization fp8")) == []


@pytest.mark.vllm
def test_vllm_stops_at_an_option_that_contradicts_the_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([(option, quantization) for option, quantization, _ in OF_VLLM]))
    ended_well = run_logged(tmp_path / "log", "support.vllm_quantization", file, program=python_of("vllm", {}))
    assert ended_well, (tmp_path / "log").read_text()[-3000:]
    assert json.loads(file.read_text()) == [stops for *_, stops in OF_VLLM]
