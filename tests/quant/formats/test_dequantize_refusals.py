"""What is refused in a quantized release: errors name tensor and file and come from headers alone if possible."""

import json

import pytest
import torch
from safetensors.torch import save_file
from support.messages import refusal
from support.models import InMemory
from support.quantized import group_config

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.quant.formats.dequantize import dequantized, describe_format, format_of

BLOCK = {"quant_method": "fp8", "weight_block_size": [2, 2]}
ROWS = {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}
MXFP4 = {"num_bits": 4, "type": "float", "scale_dtype": "torch.uint8"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def compressed(form="pack-quantized", **weights):
    usual = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return group_config(form, {"targets": ["Linear"], "weights": usual | weights})


def of_int4(*sizes):
    groups = [{"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": size}} for size in sizes]
    return group_config("pack-quantized", *groups)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "'awq'"),
        ({"quant_method": "modelopt"}, "quant_algo None"),
        ({}, "None"),
        ([1], r"quantization_config is \[1\]"),
        (BLOCK | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (BLOCK | {"scale_fmt": "e4m3"}, "scale_fmt 'e4m3'"),
        (BLOCK | {"weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        (BLOCK | {"weight_block_size": [128, 0]}, r"weight_block_size is \[128, 0\]"),
        (BLOCK | {"weight_block_size": 128}, "weight_block_size is 128"),
        (compressed("nvfp4-pack-quantized"), "format nvfp4-pack-quantized"),
        (compressed(type="float"), "type 'float'"),
        (compressed(strategy="tensor", group_size=None), "strategy 'tensor'"),
        (compressed(actorder="group"), "actorder 'group'"),
        (compressed("float-quantized", num_bits=8, type="float"), "strategy 'group'"),
        (compressed("float-quantized", **ROWS | {"type": "int"}), "type 'int'"),
        (compressed("float-quantized", **ROWS, symmetric=False), "symmetric False"),
        (of_int4(), "config_groups"),
        (of_int4(32, 64), "config_groups"),
        (compressed(nonsense=1), "compressed-tensors"),
        (NVFP4 | {"quant_algo": "NVFP4_AWQ"}, "quant_algo 'NVFP4_AWQ'"),
        (NVFP4 | {"group_size": 0}, "group_size is 0"),
        (NVFP4 | {"quant_algo": "MIXED_PRECISION"}, "quantized_layers is None"),
        ({"quant_method": "mxfp8", "weight_block_size": [128, 128]}, "weight_block_size"),
        ({"quant_method": "quark", "global_quant_config": {}}, "quant"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}}, "int4"),
        (compressed("mxfp6-quantized", **MXFP4), "format mxfp6-quantized"),
        (compressed("mxfp4-pack-quantized", **MXFP4, group_size=16), "group_size 16"),
        (compressed("nvfp4-pack-quantized", type="float", group_size=16, symmetric=False), "symmetric False"),
    ],
)
def test_formats(quantization, message):
    error = refusal(message, format_of, {"quantization_config": quantization})
    assert "config.json" in error.message or "quantization_config" in error.message
    assert error.hint
    assert message.replace("\\", "") in str(describe_format({"quantization_config": quantization}, {}))


def fp8():
    return {"x.weight": torch.ones(3, 4).to(torch.float8_e4m3fn), "x.weight_scale_inv": torch.ones(2, 2)}


def int4():
    return {
        "x.weight_packed": torch.zeros(16, 8, dtype=torch.int32),
        "x.weight_scale": torch.ones(16, 2, dtype=torch.bfloat16),
        "x.weight_shape": torch.tensor([16, 64]),
    }


def gpt_oss():
    blocks = torch.zeros(2, 3, 4, 16, dtype=torch.uint8)
    return {"x_blocks": blocks, "x_scales": torch.full((2, 3, 4), 127, dtype=torch.uint8)}


def mxfp4():
    codes = torch.zeros(2, 32, dtype=torch.uint8)
    return {"x.weight_packed": codes, "x.weight_scale": torch.full((2, 2), 127, dtype=torch.uint8)}


def deepseek_v4():
    codes, scale = mxfp4().values()
    return {"x.weight": codes.view(torch.int8), "x.scale": scale.view(torch.float8_e8m0fnu)}


def nvfp4():
    return {
        "x.weight": torch.zeros(16, 32, dtype=torch.uint8),
        "x.weight_scale": torch.ones(16, 4).to(torch.float8_e4m3fn),
        "x.weight_scale_2": torch.tensor(1.0),
    }


STORED = {
    "fp8": (BLOCK, fp8),
    "fp8 in rows": (BLOCK | {"weight_block_size": [1, 4]}, fp8),
    "fp8 of a tensor": ({"quant_method": "fp8"}, fp8),
    "int4": (compressed(), int4),
    "asymmetric": (compressed(symmetric=False), int4),
    "int4 in rows": (compressed(strategy="channel", group_size=None), int4),
    "gpt-oss": ({"quant_method": "mxfp4"}, gpt_oss),
    "mxfp4": (compressed("mxfp4-pack-quantized", **MXFP4), mxfp4),
    "deepseek-v4": (BLOCK, deepseek_v4),
    "nvfp4": (NVFP4, nvfp4),
}
ZEROS = torch.zeros(2, 2, dtype=torch.int32)


def parts_of(form, changes):
    """The tensors of a sound matrix, but for these; None: it is not there."""
    return {name: tensor for name, tensor in (STORED[form][1]() | dict(changes)).items() if tensor is not None}


def at(form, name, index, value):
    """A part of a sound matrix with another value in one place."""
    tensor = STORED[form][1]()[name]
    whole = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e8m0fnu else tensor
    whole.reshape(-1)[index] = value
    return {name: tensor}


def read(form, tensors):
    config = {"quantization_config": STORED[form][0]} | ({"expert_dtype": "fp4"} if form == "deepseek-v4" else {})
    view = dequantized(InMemory(config, tensors), "here")
    return {name: tensor for names in view.groups for name, tensor in view.read(names).items()}


@pytest.mark.parametrize("form", ["fp8", "int4", "gpt-oss", "mxfp4", "deepseek-v4", "nvfp4"])
def test_sound_parts_are_read(form):
    assert [bool(tensor.isfinite().all()) for tensor in read(form, STORED[form][1]()).values()] == [True]


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("fp8", {"x.weight_scale_inv": None}, r"x\.weight .* no x\.weight_scale_inv"),
        ("fp8", {"x.weight": None}, r"x\.weight_scale_inv"),
        ("fp8", {"y.weight_scale_inv": torch.ones(1)}, r"y\.weight_scale_inv"),
        ("fp8", {"x.weight_scale_inv": torch.ones(1, 2)}, r"scale_inv .* \[2, 2\] float32 or bf"),
        ("fp8", {"x.weight_scale_inv": torch.tensor(1.0)}, r"scale_inv .* \[2, 2\] float32"),
        ("fp8", {"x.weight_scale_inv": torch.ones(2, 2, dtype=torch.uint8)}, r"scale_inv .* uint8 .* \[2, 2\]"),
        ("fp8 in rows", {}, r"scale_inv .* \[3, 1\]"),
        ("fp8", {"v": torch.ones(4).to(torch.float8_e4m3fn)}, r"\[4\] float8_e4m3fn.*FP8"),
        ("fp8", {"experts.w": torch.ones(4, 4, dtype=torch.int8)}, r"experts\.w.*int8.*FP8"),
        ("fp8", at("fp8", "x.weight_scale_inv", 2, torch.inf), r"scale_inv.*NaN"),
        ("fp8", at("fp8", "x.weight_scale_inv", 2, -1e38), r"x\.weight_scale_inv \[2, 2\] float32.*NaN"),
        (
            "fp8",
            {"x.weight_scale_inv": torch.full((2, 2), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)},
            "scale_inv.*NaN",
        ),
        ("fp8", at("fp8", "x.weight", 7, torch.nan), r"x\.weight .* NaN"),
        ("fp8 of a tensor", {}, r"x\.weight_scale_inv \[2, 2\] float32 .* \[1, 1\]"),
        ("int4", {"x.weight_scale": None}, r"packed .* int32 .* no x\.weight_scale "),
        ("int4", {"x.weight_shape": None}, r"no x\.weight_shape"),
        ("int4", {"x.weight_packed": None}, r"x\.weight_scale, x\.weight_shape"),
        ("asymmetric", {}, r"no x\.weight_zero_point"),
        ("int4", {"x.weight_zero_point": ZEROS}, r"x\.weight_zero_point"),
        ("asymmetric", {"x.weight_zero_point": torch.zeros(2, 16, dtype=torch.int32)}, r"\[2, 16\] .* \[2, 2\] int32"),
        ("int4", {"x.weight_g_idx": torch.zeros(64, dtype=torch.int32)}, r"x\.weight_g_idx"),
        ("int4", {"x.weight_scale": torch.ones(16, 1)}, r"packed .* \[16, 4\] int32"),
        ("int4", {"x.weight_scale": torch.ones(8, 2)}, r"_scale \[8, 2\] float32 .* \[16, 2\]"),
        ("int4 in rows", {}, r"x\.weight_scale \[16, 2\] bfloat16 .* \[16, 1\]"),
        ("int4", {"x.weight_packed": torch.zeros(16, 8, dtype=torch.int64)}, r"x\.weight_packed \[16, 8\] int64"),
        ("int4", {"x.weight_packed": torch.zeros(2, 16, 8, dtype=torch.int32)}, "matrix"),
        ("int4", {"x.weight_shape": torch.tensor([16, 63])}, r"x\.weight_shape .* \[16, 63\].* \[16, 64\]"),
        ("int4", at("int4", "x.weight_scale", 3, 1e38), r"_scale \[16, 2\] bfloat16 .*NaN"),
        ("gpt-oss", {"x_scales": None}, r"x_blocks .* no x_scales"),
        ("gpt-oss", {"x_blocks": None}, "x_scales"),
        ("gpt-oss", {"x_scales": torch.zeros(2, 3, dtype=torch.uint8)}, r"x_scales \[2, 3\] .* \[2, 3, 4\] uint8"),
        ("gpt-oss", {"x_blocks": torch.zeros(2, 3, 4, 8, dtype=torch.uint8)}, r"x_blocks .*16\] uint8"),
        # 6 x 2^126 is more than BF16 has, and 255 is NaN.
        *(("gpt-oss", at("gpt-oss", "x_scales", 5, scale), "x_scales .* 252") for scale in (253, 255)),
        *(("mxfp4", at("mxfp4", "x.weight_scale", 1, scale), "_scale.* NaN") for scale in (253, 255)),
        *(("deepseek-v4", at("deepseek-v4", "x.scale", 1, scale), "scale.* NaN") for scale in (253, 255)),
        ("nvfp4", {"x.weight_scale": None}, r"no x\.weight_scale "),
        ("nvfp4", {"x.weight_scale_2": None}, r"no x\.weight_scale_2"),
        ("nvfp4", {"x.weight_scale": torch.ones(16, 2).to(torch.float8_e4m3fn)}, r"\[16, 4\] float8_e4m3fn"),
        ("nvfp4", {"x.weight_scale_2": torch.ones(2)}, r"\[\] float32"),
        ("nvfp4", {"x.weight_scale_2": torch.tensor(torch.nan)}, r"x\.weight_scale_2 \[\] float32 .*NaN"),
    ],
)
def test_parts_that_do_not_fit(form, changes, message):
    error = refusal(message, read, form, parts_of(form, changes))
    assert error.message.startswith("here: ")
    assert error.hint


def test_the_file_is_named(tmp_path):
    tensors = parts_of("fp8", at("fp8", "x.weight_scale_inv", 0, torch.nan))
    weight_map = {name: f"model-0000{index}-of-00002.safetensors" for index, name in enumerate(tensors, 1)}
    for name, file in weight_map.items():
        save_file({name: tensors[name]}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": BLOCK}))
    error = refusal("NaN", dequantized(HfCheckpoint(tmp_path), str(tmp_path)).read, ["x.weight"])
    assert error.message.startswith(f"{tmp_path / 'model-00002-of-00002.safetensors'}: x.weight_scale_inv")


def test_a_quantized_copy_of_something_else():
    copy = {"draft.weight": torch.randn(64, 32).to(torch.float8_e4m3fn), "draft.weight_scale": torch.ones(64, 1)}
    config = {"quantization_config": compressed("float-quantized", **ROWS)}

    def opened(head):
        tensors = {"lm_head.weight": head, **copy}
        return dequantized(InMemory(config, tensors), "here", {"draft.weight": "lm_head.weight"})

    with pytest.raises(CkptkitError, match=r"draft\.weight.*lm_head\.weight"):
        opened(torch.randn(64, 32)).read(["draft.weight"])
    refusal(r"draft\.weight.*lm_head\.weight \[64, 16\] float32", opened, torch.randn(64, 16))
