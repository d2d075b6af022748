"""CK747: formats that slime, miles and vime cannot send."""

import warnings

import pytest
import torch
from support.launch_scripts import quantized_launch

from ckptkit.verify.launch.preflight import preflight

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def launched(folder, quantization, change=str):
    report = preflight(script=quantized_launch(folder, "qwen3_moe", quantization, change))
    return [one for one in report.findings if one.code == "CK747"]


def with_vllm(option="--vllm-enable-expert-parallel"):
    return lambda text: text.replace("--sglang-ep-size 8", option)


DYNAMIC = {**FP8, "activation_scheme": "dynamic"}
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
MXFP8, MXFP4 = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}, {"quant_method": "mxfp4"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
SCHEME = "activation_scheme = dynamic"
PACKED, PACKED_BY_VIME = (f"a quant_method that {one} packs" for one in ("slime or miles", "vime"))
# The format, the trainer, and what is expected instead. vime 0696c9b sends the BF16 tensors in the last line of its
# `megatron_to_hf/processors/__init__.py`.
FORMATS = [
    ({**DYNAMIC, "fmt": "e4m3"}, "slime", ""),
    ({**FP8, "activation_scheme": "static"}, "slime", SCHEME),
    (FP8, "slime", SCHEME),
    ({**DYNAMIC, "fmt": "e5m2"}, "slime", "fmt = e4m3"),
    (MXFP8, "slime", ""),
    (NVFP4, "slime", ""),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "slime", PACKED),
    (MXFP4, "slime", PACKED),
    (DYNAMIC, "vime", ""),
    (INT4, "vime", ""),
    *((one, "vime", f"{PACKED_BY_VIME}: compressed-tensors, fp8") for one in (MXFP8, NVFP4, MXFP4)),
]


@pytest.mark.parametrize(("quantization", "trainer", "expected"), FORMATS)
def test_a_format_that_the_trainer_cannot_send_is_found(quantization, trainer, expected, tmp_path):
    found = launched(tmp_path, quantization, with_vllm() if trainer == "vime" else str)
    severity = "warning" if quantization["quant_method"] == "mxfp4" else "error"
    assert [one.severity for one in found] == [severity] * bool(expected)
    assert all(one.expected.startswith(expected) for one in found)


def test_bf16_that_sglang_packs_by_itself_is_a_warning(tmp_path):
    added = "--sglang-quantization fp8 --sglang-ep-size 8"
    (found,) = launched(tmp_path, None, lambda text: text.replace("--sglang-ep-size 8", added))
    assert found.severity == "warning"
    assert "--sglang-quantization" in found.expected
    assert launched(tmp_path / "twin", None) == []
    assert launched(tmp_path / "vllm", None, with_vllm("--vllm-quantization fp8")) == []


@pytest.mark.sglang
def test_sglangs_fp8_parameter_refuses_bf16_only_where_columns_are_cut():
    """Why BF16 sent to an engine in FP8 is an error: it stops there, and elsewhere takes weights for codes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.layers.parameter import ModelWeightParameter

        sent = torch.full((4, 4), 0.02, dtype=torch.bfloat16)

        def parameter():
            codes = torch.zeros(4, 4, dtype=torch.float8_e4m3fn)
            return ModelWeightParameter(data=codes, input_dim=1, output_dim=0, weight_loader=lambda *given: None)

        with pytest.raises(ValueError, match="Downcasting not allowed"):
            parameter().load_column_parallel_weight(sent, tp_rank=0)
        for weight in (sent.to(torch.float8_e4m3fn), sent):
            found = parameter()
            found.load_row_parallel_weight(weight, tp_rank=0)
            assert torch.equal(found.data.float(), sent.to(torch.float8_e4m3fn).float())
