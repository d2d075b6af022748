"""MXFP8, MXFP4 and NVFP4 in every spelling, by hand and by the code of compressed-tensors and transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from support.installed import since
from support.models import InMemory
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.reader import HfCheckpoint
from converters.foreign import MODELOPT_READ
from quant.formats.dequantize import dequantized, described, format_of, modelopt_format
from quant.formats.floats.release import Floats

ROWS, COLUMNS = 48, 96


def read(quantization: Mapping[str, Any], tensors: Mapping[str, Tensor], **config: Any) -> dict[str, Tensor]:
    """Every tensor that a checkpoint of these tensors dequantizes to."""
    view = dequantized(InMemory({"quantization_config": quantization, **config}, tensors), "here")
    return {name: tensor for names in view.groups for name, tensor in view.read(names).items()}


def same(left: Tensor, right: Tensor) -> bool:
    """Equal dtype, shape and bytes."""
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def bytes_of(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=seeded())


def compressed(form: str, weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "float", "symmetric": True, **weights}, "format": form, **more}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


NVFP4 = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
MXFP4 = {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
MXFP8 = {"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
INPUTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


def scheme_of(weights: Mapping[str, Any], form: str) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(type="float", **weights), format=form)


def nvfp4(divisor: float) -> dict[str, Tensor]:
    """Any codes, and every block scale that is a number above zero."""
    scales = (torch.arange(ROWS * COLUMNS // 16) % 126 + 1).to(torch.uint8).view(torch.float8_e4m3fn)
    return {
        "x.weight_packed": bytes_of(ROWS, COLUMNS // 2),
        "x.weight_scale": scales.reshape(ROWS, COLUMNS // 16),
        "x.weight_global_scale": torch.tensor([divisor]),
        "x.input_global_scale": torch.tensor([3.0]),
    }


@pytest.mark.parametrize("divisor", [28928.0, 28822.37, 2.0**14, 0.3])
def test_nvfp4_is_what_compressed_tensors_makes_of_it(divisor: float) -> None:
    stored, form = nvfp4(divisor), "nvfp4-pack-quantized"
    parts = {name.removeprefix("x."): tensor for name, tensor in stored.items()}
    meant = NVFP4PackedCompressor.decompress(parts, scheme_of(NVFP4, form))["weight"]
    found = read(compressed(form, NVFP4, input_activations=INPUTS), stored)
    assert list(found) == ["x.weight"]
    assert same(found["x.weight"], meant.to(torch.bfloat16))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_modelopts_nvfp4_multiplies_what_compressed_tensors_divides(shape: tuple[int, ...]) -> None:
    """By a power of two, both are exact."""
    stored, form = nvfp4(2.0**14), "nvfp4-pack-quantized"
    parts = {name.removeprefix("x."): tensor for name, tensor in stored.items()}
    meant = NVFP4PackedCompressor.decompress(parts, scheme_of(NVFP4, form))["weight"]
    tensors = {
        "x.weight": stored["x.weight_packed"],
        "x.weight_scale": stored["x.weight_scale"],
        "x.weight_scale_2": torch.full(shape, 2.0**-14),
        "x.input_scale": torch.tensor(0.1),
        "x.k_scale": torch.tensor(0.1),
    }
    for algorithm in ("NVFP4", "W4A16_NVFP4"):
        found = read(modelopt(algorithm, kv_cache_scheme={"type": "float"}), tensors)
        assert list(found) == ["x.weight"]
        assert same(found["x.weight"], meant.to(torch.bfloat16))


def test_quarks_nvfp4_is_modelopts_with_another_name_of_the_inputs_scale() -> None:
    tensors = {
        "x.weight": bytes_of(16, 32),
        "x.weight_scale": torch.rand(16, 4, generator=seeded()).to(torch.float8_e4m3fn),
        "x.weight_scale_2": torch.tensor(0.5),
    }
    meant = read(modelopt("NVFP4"), {**tensors, "x.input_scale": torch.ones(())})
    scheme = [
        {"dtype": "fp4", "qscheme": "per_group", "group_size": 16},
        {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
    ]
    quark = {"weight": scheme, "input_tensors": scheme}
    content = {"quant_method": "quark", "global_quant_config": quark}
    assert same(read(content, {**tensors, "x.input_scale_2": torch.ones(())})["x.weight"], meant["x.weight"])


@pytest.mark.parametrize("bias", [0, 90, 127, 252 - 31])
def test_mxfp4_is_what_compressed_tensors_and_transformers_make_of_it(bias: int) -> None:
    codes, scales = bytes_of(ROWS, COLUMNS // 2), bytes_of(ROWS, COLUMNS // 32, high=32) + bias
    parts = {"weight_packed": codes, "weight_scale": scales}
    by_transformers = convert_moe_packed_tensors(
        codes.reshape(1, ROWS, COLUMNS // 32, 16), scales.reshape(1, ROWS, COLUMNS // 32)
    )[0].T
    found = read(compressed("mxfp4-pack-quantized", MXFP4), {f"x.{name}": tensor for name, tensor in parts.items()})
    assert same(found["x.weight"], by_transformers)
    if bias:  # 2^-127 is less than compressed-tensors can compute with
        meant = MXFP4PackedCompressor.decompress(parts, scheme_of(MXFP4, "mxfp4-pack-quantized"))["weight"]
        assert same(found["x.weight"], meant)
    quark = {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}}
    as_weight = {"x.weight": codes, "x.weight_scale": scales}
    for content in ({"quant_method": "quark", "global_quant_config": quark}, modelopt("MXFP4")):
        assert same(read(content, as_weight)["x.weight"], by_transformers)


def test_deepseek_v4s_experts_beside_its_fp8() -> None:
    codes, scales = bytes_of(ROWS, COLUMNS // 2), bytes_of(ROWS, COLUMNS // 32, low=100, high=140)
    meant = convert_moe_packed_tensors(
        codes.reshape(1, ROWS, COLUMNS // 32, 16), scales.reshape(1, ROWS, COLUMNS // 32)
    )[0].T
    weight = torch.randn(130, 200, generator=seeded()).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[120, 121], [127, 130]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    tensors = {
        "layers.0.ffn.experts.0.w1.weight": codes.view(torch.int8),
        "layers.0.ffn.experts.0.w1.scale": scales.view(torch.float8_e8m0fnu),
        "layers.0.attn.wq_a.weight": weight,
        "layers.0.attn.wq_a.scale": exponents,
        "layers.0.hc_attn_scale": torch.ones(3),
    }
    content = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    found = read(content, tensors, expert_dtype="fp4")
    assert list(found) == [name for name in tensors if not name.endswith(".scale")]
    assert same(found["layers.0.ffn.experts.0.w1.weight"], meant)
    factors = exponents.float().repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :200]
    assert same(found["layers.0.attn.wq_a.weight"], (weight.float() * factors).to(torch.bfloat16))
    text = described({"quantization_config": content, "expert_dtype": "fp4"}, InMemory({}, tensors).specs)
    assert text is not None
    assert "MXFP4 (4-bit floats, one power of two for each 32 weights): 1 tensors" in text
    assert "FP8 (float8_e4m3fn, one scale for each block of 128 x 128): 1 tensors" in text


@since("compressed-tensors", (0, 17), "it has no MXFP8 before")
def test_mxfp8_is_what_compressed_tensors_makes_of_it() -> None:
    from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor

    weight = torch.randn(ROWS, COLUMNS, generator=seeded()).to(torch.float8_e4m3fn)
    scales = bytes_of(ROWS, COLUMNS // 32, low=60, high=200)
    parts = {"weight": weight, "weight_scale": scales}
    meant = MXFP8QuantizationCompressor.decompress(parts, scheme_of(MXFP8, "mxfp8-quantized"))["weight"]
    expected = meant.to(torch.bfloat16)
    stored = {f"x.{name}": tensor for name, tensor in parts.items()}
    miles = {"quant_method": "mxfp8", "fmt": "e4m3", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}
    for content in (compressed("mxfp8-quantized", MXFP8), modelopt("MXFP8"), miles, {"quant_method": "mxfp8"}):
        assert same(read(content, stored)["x.weight"], expected)
    inverse = {"x.weight": weight, "x.weight_scale_inv": scales}
    assert same(read(miles, inverse)["x.weight"], expected)


@pytest.mark.parametrize(
    ("algorithm", "shape", "block"),
    [("FP8", (), (256, 384)), ("FP8_PER_CHANNEL_PER_TOKEN", (256,), (1, 384)), ("fp8_pb_wo", (2, 1, 3, 1), (128, 128))],
)
def test_modelopts_fp8(algorithm: str, shape: tuple[int, ...], block: tuple[int, int]) -> None:
    weight = torch.randn(256, 384, generator=seeded()).to(torch.float8_e4m3fn)
    scales = torch.rand(shape, generator=seeded()) * 0.01 + 1e-4
    factors = torch.kron(scales.reshape(256 // block[0], 384 // block[1]), torch.ones(block))
    found = read(modelopt(algorithm), {"x.weight": weight, "x.weight_scale": scales, "x.input_scale": torch.ones(())})
    assert same(found["x.weight"], (weight.float() * factors).to(torch.bfloat16))


def test_each_module_of_a_mixed_release_has_its_own_format() -> None:
    codes, scales = bytes_of(16, 32), torch.full((16, 4), 1.0).to(torch.float8_e4m3fn)
    weight = torch.randn(16, 64, generator=seeded()).to(torch.float8_e4m3fn)
    layers = {
        "a": {"quant_algo": "FP8"},
        "b.mlp": {"quant_algo": "NVFP4", "group_size": 16},
        "c": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    }
    rows = torch.rand(16, generator=seeded())
    tensors = {
        "a.weight": weight,
        "a.weight_scale": torch.tensor(0.5),
        "b.mlp.up.weight": codes,
        "b.mlp.up.weight_scale": scales,
        "b.mlp.up.weight_scale_2": torch.tensor(1.0),
        "c.weight": weight,
        "c.weight_scale": rows,
    }
    found = read(modelopt("MIXED_PRECISION", quantized_layers=layers), tensors)
    assert same(found["a.weight"], (weight.float() * 0.5).to(torch.bfloat16))
    assert same(found["c.weight"], (weight.float() * rows[:, None]).to(torch.bfloat16))
    one = convert_moe_packed_tensors(codes.reshape(1, 16, 2, 16), torch.full((1, 16, 2), 127, dtype=torch.uint8))
    assert same(found["b.mlp.up.weight"], one[0].T)


def test_groups_of_one_compressed_tensors_config() -> None:
    weight = torch.randn(64, 64, generator=seeded()).to(torch.float8_e4m3fn)
    rows = torch.rand(64, 1, generator=seeded())
    content = compressed("nvfp4-pack-quantized", NVFP4)
    content["config_groups"]["group_1"] = {
        "targets": ["re:.*attn.*"],
        "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
        "format": "float-quantized",
    }
    content["format"] = "mixed-precision"
    parts = {f"mlp.{name.removeprefix('x.')}": tensor for name, tensor in nvfp4(64.0).items()}
    del parts["mlp.input_global_scale"]
    found = read(content, parts | {"attn.weight": weight, "attn.weight_scale": rows})
    assert list(found) == ["mlp.weight", "attn.weight"]
    assert same(found["attn.weight"], (weight.float() * rows).to(torch.bfloat16))


def test_hf_quant_config_alone_says_how(tmp_path: Path) -> None:
    tensors = {
        "x.weight": bytes_of(16, 32),
        "x.weight_scale": torch.ones(16, 4).to(torch.float8_e4m3fn),
        "x.weight_scale_2": torch.tensor(0.5),
        "norm.weight": torch.ones(3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x"}))
    assert HfCheckpoint(tmp_path).config == {"model_type": "x"}
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    view = dequantized(HfCheckpoint(tmp_path), str(tmp_path))
    assert view.config == {"model_type": "x"}
    assert {name: spec.shape for name, spec in view.specs.items()} == {"norm.weight": (3,), "x.weight": (16, 64)}
    beside["quantization"] = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert HfCheckpoint(tmp_path).config == {"model_type": "x"}
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CkptkitError, match=r"hf_quant_config\.json has no object `quantization`"):
        HfCheckpoint(tmp_path)


def test_every_algorithm_that_is_not_refused_is_read() -> None:
    for algorithm in MODELOPT_READ:
        layers = {"a": {"quant_algo": "FP8"}} if algorithm == "MIXED_PRECISION" else None
        assert modelopt_format(modelopt(algorithm, quantized_layers=layers)).layouts


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (modelopt("NVFP4_AWQ"), "'modelopt' with quant_algo 'NVFP4_AWQ' is not supported"),
        (modelopt("NVFP4", group_size=0), "group_size is 0"),
        (modelopt("MIXED_PRECISION"), "quantized_layers is None"),
        ({"quant_method": "mxfp8", "weight_block_size": [128, 128]}, "MXFP8 with weight_block_size"),
        ({"quant_method": "mxfp8", "fmt": "e5m2"}, "MXFP8 with fmt 'e5m2' is not supported"),
        ({"quant_method": "quark", "global_quant_config": {}}, "quark quantizes no weights"),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4", "qscheme": "per_group"}}},
            "'quark' with weights of .*int4.* is not supported",
        ),
        (compressed("mxfp6-quantized", MXFP4), "format mxfp6-quantized is not supported"),
        (compressed("mxfp4-pack-quantized", MXFP4 | {"group_size": 16}), "group_size 16 is not supported"),
        (compressed("nvfp4-pack-quantized", NVFP4 | {"symmetric": False}), "symmetric False is not supported"),
    ],
    ids=str,
)
def test_what_is_not_read_is_named(content: dict[str, Any], message: str) -> None:
    with pytest.raises(CkptkitError, match=message) as error:
        format_of({"quantization_config": content})
    assert error.value.hint


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("x.weight_scale", None, r"has no x\.weight_scale beside it"),
        ("x.weight_scale_2", None, r"has no x\.weight_scale_2 beside it"),
        ("x.weight_scale", torch.ones(16, 2).to(torch.float8_e4m3fn), r"must be \[16, 4\] float8_e4m3fn"),
        ("x.weight_scale", torch.ones(16, 4), r"must be \[16, 4\] float8_e4m3fn"),
        ("x.weight_scale_2", torch.ones(2), r"must be \[\] float32"),
        ("x.weight_scale_2", torch.tensor(torch.nan), r"x\.weight_scale_2 \[\] float32 gives NaN"),
        ("x.weight", torch.zeros(16, dtype=torch.uint8), "is NVFP4 and not a matrix"),
    ],
)
def test_parts_of_nvfp4_that_do_not_fit(name: str, tensor: Tensor | None, message: str) -> None:
    tensors = {
        "x.weight": bytes_of(16, 32),
        "x.weight_scale": torch.ones(16, 4).to(torch.float8_e4m3fn),
        "x.weight_scale_2": torch.tensor(1.0),
    }
    tensors = {key: value for key, value in (tensors | {name: tensor}).items() if value is not None}
    with pytest.raises(CkptkitError, match=message):
        read(modelopt("NVFP4"), tensors)


def test_a_config_of_integers_and_floats_has_its_floats() -> None:
    from quant.formats.compressed import compressed_floats

    content = compressed("nvfp4-pack-quantized", NVFP4)
    content["config_groups"]["group_1"] = {
        "targets": ["re:.*experts.*"],
        "weights": {"num_bits": 4, "type": "int", "group_size": 32},
    }
    found = compressed_floats(content)
    assert isinstance(found, Floats)
    assert len(found.layouts) == 1
    assert compressed_floats({"config_groups": {"g": content["config_groups"]["group_1"]}}) is None
