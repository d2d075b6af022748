"""What is refused in a quantized release: errors name tensor and file and come from headers alone if possible."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.models import InMemory
from torch import Tensor

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.quant.formats.dequantize import dequantized, described, format_of

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], Any]

BLOCK = {"quant_method": "fp8", "weight_block_size": [2, 2]}


def compressed(weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **weights},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        **more,
    }


def fp8() -> Tensors:
    return {"x.weight": torch.ones(3, 4).to(torch.float8_e4m3fn), "x.weight_scale_inv": torch.ones(2, 2)}


def int4() -> Tensors:
    return {
        "x.weight_packed": torch.zeros(16, 8, dtype=torch.int32),
        "x.weight_scale": torch.ones(16, 2, dtype=torch.bfloat16),
        "x.weight_shape": torch.tensor([16, 64]),
    }


def mxfp4() -> Tensors:
    return {
        "x_blocks": torch.zeros(2, 3, 4, 16, dtype=torch.uint8),
        "x_scales": torch.full((2, 3, 4), 127, dtype=torch.uint8),
    }


def read_all(quantization: Any, tensors: Tensors) -> Tensors:
    view = dequantized(InMemory({"quantization_config": quantization}, tensors), "here")
    return {name: tensor for names in view.groups for name, tensor in view.read(names).items()}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "quantization method 'awq' is not supported"),
        ({"quant_method": "modelopt"}, "'modelopt' with quant_algo None"),
        ({}, "quantization method None is not supported"),
        ([1], r"quantization_config is \[1\], not an object"),
        (BLOCK | {"fmt": "e5m2"}, "FP8 with fmt 'e5m2' is not supported"),
        (BLOCK | {"scale_fmt": "e4m3"}, "FP8 with scale_fmt 'e4m3' is not supported"),
        (BLOCK | {"weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        (BLOCK | {"weight_block_size": [128, 0]}, r"weight_block_size is \[128, 0\]"),
        (BLOCK | {"weight_block_size": [128, 1.5]}, r"weight_block_size is \[128, 1.5\]"),
        (BLOCK | {"weight_block_size": 128}, "weight_block_size is 128"),
        (compressed({}, format="nvfp4-pack-quantized"), "format nvfp4-pack-quantized is not supported"),
        (compressed({}, format="mixed-precision"), "format mixed-precision is not supported"),
        (compressed({"num_bits": 8}), "num_bits 8 is not supported"),
        (compressed({"type": "float"}), "type 'float' is not supported"),
        (compressed({"strategy": "tensor", "group_size": None}), "strategy 'tensor' is not supported"),
        (compressed({"actorder": "group"}), "actorder 'group' is not supported"),
        (compressed({"actorder": "dynamic"}), "actorder 'dynamic' is not supported"),
        (compressed({"num_bits": 8, "type": "float"}, format="float-quantized"), "strategy 'group' is not supported"),
        (
            compressed({"num_bits": 8, "strategy": "channel", "group_size": None}, format="float-quantized"),
            "type 'int' is not supported",
        ),
        (
            compressed(
                {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None, "symmetric": False},
                format="float-quantized",
            ),
            "symmetric False",
        ),
        (compressed({}, config_groups={}), "config_groups"),
        (
            compressed(
                {},
                config_groups={
                    f"g{size}": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": size}}
                    for size in (32, 64)
                },
            ),
            "config_groups",
        ),
        (compressed({"nonsense": 1}), "compressed-tensors refuses this quantization_config"),
    ],
)
def test_formats(quantization: Any, message: str) -> None:
    with pytest.raises(CkptkitError, match=message) as error:
        format_of({"quantization_config": quantization})
    assert "config.json" in error.value.message or "quantization_config" in error.value.message
    assert error.value.hint
    assert message.replace("\\", "") in str(described({"quantization_config": quantization}, {}))


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


def at(name: str, index: Any, value: float) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[name].reshape(-1)[index] = value

    return change


STORED: dict[str, tuple[dict[str, Any], Callable[[], Tensors]]] = {
    "fp8": (BLOCK, fp8),
    "fp8 in rows": (BLOCK | {"weight_block_size": [1, 4]}, fp8),
    "fp8 of a tensor": ({"quant_method": "fp8"}, fp8),
    "int4": (compressed({}), int4),
    "asymmetric": (compressed({"symmetric": False}), int4),
    "int4 in 64": (compressed({"group_size": 64}), int4),
    "int4 in rows": (compressed({"strategy": "channel", "group_size": None}), int4),
    "mxfp4": ({"quant_method": "mxfp4"}, mxfp4),
}


def unchanged(tensors: Tensors) -> None: ...


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("fp8", without("x.weight_scale_inv"), r"x\.weight .* has no x\.weight_scale_inv beside it"),
        ("fp8", without("x.weight"), r"x\.weight_scale_inv"),
        ("fp8", put("x.weight", torch.ones(3, 4)), r"x\.weight_scale_inv"),
        ("fp8", put("y.weight_scale_inv", torch.ones(1)), r"y\.weight_scale_inv"),
        ("fp8", put("x.weight_scale_inv", torch.ones(1, 2)), r"scale_inv .* must be \[2, 2\] float32 or bf"),
        ("fp8", put("x.weight_scale_inv", torch.ones(2, 2, 1)), r"must be \[2, 2\]"),
        ("fp8", put("x.weight_scale_inv", torch.tensor(1.0)), r"must be \[2, 2\]"),
        ("fp8", put("x.weight_scale_inv", torch.ones(2, 2, dtype=torch.uint8)), r"scale_inv .* uint8 must be"),
        ("fp8 in rows", unchanged, r"must be \[3, 1\]"),
        ("fp8", put("v", torch.ones(4).to(torch.float8_e4m3fn)), r"\[4\] float8_e4m3fn.*FP8"),
        ("fp8", put("y.weight", torch.ones(4, 4).to(torch.float8_e5m2)), r"y\.weight.*e5m2.*FP8"),
        ("fp8", put("experts.w", torch.ones(4, 4, dtype=torch.int8)), r"experts\.w.*int8.*FP8"),
        ("fp8", at("x.weight_scale_inv", 2, torch.nan), r"scale_inv.*NaN"),
        ("fp8", at("x.weight_scale_inv", 2, torch.inf), r"scale_inv.*NaN"),
        ("fp8", at("x.weight_scale_inv", 2, -1e38), r"x\.weight_scale_inv \[2, 2\] float32.*NaN"),
        (
            "fp8",
            put("x.weight_scale_inv", torch.full((2, 2), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)),
            "NaN",
        ),
        ("fp8", at("x.weight", 7, torch.nan), r"x\.weight .* holds NaN, which some quantizers"),
        ("fp8 of a tensor", unchanged, r"x\.weight_scale_inv \[2, 2\] float32 must be \[1, 1\]"),
        ("int4", without("x.weight_scale"), r"packed .* int32 has no x\.weight_scale beside it"),
        ("int4", without("x.weight_shape"), r"has no x\.weight_shape beside it"),
        ("int4", without("x.weight_packed"), r"x\.weight_scale, x\.weight_shape"),
        ("asymmetric", unchanged, r"has no x\.weight_zero_point beside it"),
        ("int4", put("x.weight_zero_point", torch.zeros(2, 2, dtype=torch.int32)), r"beside x\.weight_zero_point"),
        ("asymmetric", put("x.weight_zero_point", torch.zeros(16, 2, dtype=torch.int8)), r"must be \[2, 2\] int32"),
        ("asymmetric", put("x.weight_zero_point", torch.zeros(2, 16, dtype=torch.int32)), r"must be \[2, 2\] int32"),
        ("int4", put("x.weight_g_idx", torch.zeros(64, dtype=torch.int32)), r"beside x\.weight_g_idx"),
        ("int4", put("x.weight_scale", torch.ones(16, 1)), r"packed .* must be \[16, 4\] int32"),
        ("int4", put("x.weight_scale", torch.ones(8, 2)), r"_scale \[8, 2\] float32 must be \[16, 2\]"),
        ("int4", put("x.weight_scale", torch.ones(16, 2).to(torch.float8_e4m3fn)), "must be"),
        ("int4 in 64", unchanged, r"packed \[16, 8\] .* must be \[16, 16\] int32"),
        ("int4 in rows", unchanged, r"x\.weight_scale \[16, 2\] bfloat16 must be \[16, 1\]"),
        (
            "int4",
            put("x.weight_packed", torch.zeros(16, 8, dtype=torch.int64)),
            r"x\.weight_packed \[16, 8\] int64 must be",
        ),
        ("int4", put("x.weight_packed", torch.zeros(2, 16, 8, dtype=torch.int32)), "matrix"),
        (
            "int4",
            put("x.weight_shape", torch.tensor([16, 63])),
            r"x\.weight_shape \[2\] int64 says \[16, 63\], but .* make \[16, 64\]",
        ),
        ("int4", put("x.weight_shape", torch.tensor([16, 64, 1])), r"_shape \[3\] int64 must be \[2\]"),
        ("int4", at("x.weight_scale", 3, torch.nan), r"_scale \[16, 2\] bfloat16 gives NaN"),
        ("int4", at("x.weight_scale", 3, 1e38), r"_scale \[16, 2\] bfloat16 gives NaN"),
        ("mxfp4", without("x_scales"), r"x_blocks .* has no x_scales beside it"),
        ("mxfp4", without("x_blocks"), "x_scales"),
        (
            "mxfp4",
            put("x_scales", torch.zeros(2, 3, dtype=torch.uint8)),
            r"x_scales \[2, 3\] uint8 must be \[2, 3, 4\] uint8",
        ),
        (
            "mxfp4",
            put("x_blocks", torch.zeros(2, 3, 4, 8, dtype=torch.uint8)),
            r"must be \[experts, rows, groups, 16\] uint8",
        ),
        (
            "mxfp4",
            put("x_blocks", torch.zeros(2, 3, 4, 16, dtype=torch.int8)),
            r"must be \[experts, rows, groups, 16\] uint8",
        ),
        ("mxfp4", at("x_scales", 5, 255), r"x_scales .* holds exponents above 252"),
        ("mxfp4", at("x_scales", 5, 253), r"x_scales .* holds exponents above 252"),
    ],
)
def test_parts_that_do_not_fit(form: str, change: Change, message: str) -> None:
    quantization, make = STORED[form]
    tensors = make()
    change(tensors)
    with pytest.raises(CkptkitError, match=message) as error:
        read_all(quantization, tensors)
    assert error.value.message.startswith("here: ")
    assert error.value.hint


def test_the_file_is_named(tmp_path: Path) -> None:
    tensors = fp8()
    tensors["x.weight_scale_inv"][0, 0] = torch.nan
    save_file({"x.weight": tensors["x.weight"]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"x.weight_scale_inv": tensors["x.weight_scale_inv"]}, tmp_path / "model-00002-of-00002.safetensors")
    weight_map = {name: f"model-0000{index}-of-00002.safetensors" for index, name in enumerate(tensors, 1)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": BLOCK}))
    view = dequantized(HfCheckpoint(tmp_path), str(tmp_path))
    with pytest.raises(CkptkitError, match="NaN") as error:
        view.read(["x.weight"])
    assert error.value.message.startswith(f"{tmp_path / 'model-00002-of-00002.safetensors'}: x.weight_scale_inv")


def copies(head: Tensor, copy: Tensor) -> Any:
    scale = torch.ones(copy.shape[0], 1)
    tensors = {"lm_head.weight": head, "draft.weight": copy.to(torch.float8_e4m3fn), "draft.weight_scale": scale}
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}
    config = {"quantization_config": compressed(weights, format="float-quantized")}
    return dequantized(InMemory(config, tensors), "here", {"draft.weight": "lm_head.weight"})


def test_a_quantized_copy_of_something_else() -> None:
    view = copies(torch.randn(64, 32), torch.randn(64, 32))
    with pytest.raises(CkptkitError, match=r"draft\.weight.*is.*lm_head\.weight"):
        view.read(["draft.weight"])
    with pytest.raises(CkptkitError, match=r"draft\.weight.*is.*lm_head\.weight \[64, 16\] float32"):
        copies(torch.randn(64, 16), torch.randn(64, 32))
