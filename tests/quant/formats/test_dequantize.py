"""Dequantizing by hand-worked numbers, by slow formulas, and by the code of transformers and compressed-tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from support import quantized
from support.installed import since
from support.models import InMemory
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ckptkit.core.errors import CkptkitError
from quant.formats.dequantize import dequantized

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def compressed(weights: Mapping[str, Any], form: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    """A quantization_config as compressed-tensors writes it, with these `weights` in its one group."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, **weights}, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def read(quantization: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor that a checkpoint of these tensors dequantizes to."""
    view = dequantized(InMemory({"model_type": "x", "quantization_config": quantization}, tensors), "here")
    assert view.config == {"model_type": "x"}
    return {name: tensor for names in view.groups for name, tensor in view.read(names).items()}


def same(left: Tensor, right: Tensor) -> bool:
    """Equal dtype, shape and bytes."""
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


def fp8(*rows: list[int]) -> Tensor:
    """FP8 numbers from their bytes."""
    return torch.tensor(rows, dtype=torch.uint8).view(torch.float8_e4m3fn)


def spread(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """Returns the scale of every weight, float32: each is repeated over its block; the last blocks may be partial."""
    matrices = [
        torch.kron(scale, torch.ones(block))[: shape[-2], : shape[-1]]
        for scale in scales.float().reshape(-1, *scales.shape[-2:])
    ]
    return torch.stack(matrices).reshape(shape)


def decoded(byte: int) -> float:
    """What a byte of float8_e4m3fn means, by the OCP 8-bit floating point specification."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 0xF, byte & 7
    return sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_every_fp8_byte() -> None:
    numbers = [byte for byte in range(256) if byte & 0x7F != 0x7F]
    found = read(
        FP8 | {"weight_block_size": [1, 256]}, {"x.weight": fp8(numbers), "x.weight_scale_inv": torch.ones(1, 1)}
    )
    assert same(found["x.weight"], torch.tensor([[decoded(byte) for byte in numbers]], dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "shape", [(1, 1), (7, 5), (128, 128), (129, 127), (300, 260), (300, 1100), (576, 40), (3, 130, 70), (2, 3, 5, 9)]
)
@pytest.mark.parametrize("block", [(128, 128), (1, 32), (64, 1), (33, 57)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_fp8_blocks_of_every_size(shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    grid = (*shape[:-2], math.ceil(shape[-2] / block[0]), math.ceil(shape[-1] / block[1]))
    scales = (torch.rand(grid, generator=generator) * 0.01 + 1e-4).to(dtype)
    if dtype.itemsize > 1:
        scales.view(-1)[0] = 0  # what a quantizer makes of a block of zeros
    expected = (weight.float() * spread(scales, block, weight.shape)).to(torch.bfloat16)
    found = read(
        FP8 | {"weight_block_size": list(block), "scale_fmt": "ue8m0"},
        {"x.weight": weight, "x.weight_scale_inv": scales},
    )
    assert same(found["x.weight"], expected)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("at", [0, 300_001, -1])
def test_nan_is_found_wherever_it_is(byte: int, at: int) -> None:
    weight = torch.zeros(600, 1000, dtype=torch.uint8)
    weight.view(-1)[at] = byte
    tensors = {"x.weight": weight.view(torch.float8_e4m3fn), "x.weight_scale_inv": torch.ones(5, 8)}
    with pytest.raises(CkptkitError, match="x.weight .* holds NaN"):
        read(FP8 | {"weight_block_size": [128, 128]}, tensors)


def test_fused_experts_and_exponents_as_bytes() -> None:
    weight = torch.randn(2, 64, 96).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[[120, 121, 130]], [[127, 126, 1]]], dtype=torch.uint8)
    tensors = {"mlp.experts.gate_up_proj": weight, "mlp.experts.gate_up_proj_scale_inv": exponents}
    found = read(FP8 | {"weight_block_size": [64, 32], "scale_fmt": "ue8m0"}, tensors)
    factors = 2.0 ** (exponents.double() - 127).repeat_interleave(32, 2)
    assert same(found["mlp.experts.gate_up_proj"], (weight.double() * factors).to(torch.bfloat16))


@pytest.mark.parametrize("scale", [torch.tensor(0.003), torch.tensor([0.003])])
@pytest.mark.parametrize("ending", ["_scale_inv", "_scale"])
def test_one_fp8_scale_a_tensor(scale: Tensor, ending: str) -> None:
    weight = torch.randn(5, 7).to(torch.float8_e4m3fn)
    tensors = {"x.weight": weight, "x.input_scale": torch.ones(1), f"x.weight{ending}": scale}
    found = read(FP8 | {"activation_scheme": "static"}, tensors)
    assert list(found) == ["x.weight"]
    assert same(found["x.weight"], (weight.float() * 0.003).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
def test_fp8_is_what_transformers_makes_of_it(dtype: torch.dtype) -> None:
    weight = torch.randn(4, 96, 64).to(torch.float8_e4m3fn)
    scales = (torch.rand(4, 3, 2) * 0.01 + 1e-4).to(dtype)
    found = read(FP8 | {"weight_block_size": [32, 32]}, {"x.weight": weight, "x.weight_scale_inv": scales})
    assert same(found["x.weight"], Fp8Dequantize(None)._dequantize_one(weight, scales, torch.bfloat16))


UNEVEN_BLOCKS = since("compressed-tensors", (0, 20), "its compressor takes whole blocks only")
BLOCKS: dict[str, Any] = {"strategy": "block", "block_structure": [32, 48]}


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        *(({"strategy": strategy}, shape) for strategy in ("tensor", "channel") for shape in ((64, 96), (77, 50))),
        (BLOCKS, (64, 96)),
        pytest.param(BLOCKS, (77, 50), marks=UNEVEN_BLOCKS),
    ],
    ids=str,
)
def test_fp8_is_what_compressed_tensors_makes_of_it(arguments: dict[str, Any], shape: tuple[int, int]) -> None:
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, **arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format="float-quantized")
    weight = torch.randn(shape).to(torch.bfloat16) * 0.02
    scale = scales_of(weight, args)[0]
    stored = FloatQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    config = compressed(arguments | {"num_bits": 8, "type": "float"}, "float-quantized", input_activations=None)
    found = read(config, {f"x.{name}": tensor for name, tensor in stored.items()} | {"norm.weight": torch.ones(3)})
    assert stored["weight"].dtype == torch.float8_e4m3fn
    assert list(found) == ["x.weight", "norm.weight"]
    assert same(found["x.weight"], FloatQuantizationCompressor.decompress(stored, scheme)["weight"].to(torch.bfloat16))


def scales_of(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Scales and zero points of a matrix by compressed-tensors' formula, over the weights that share one."""
    rows, columns = weight.shape
    if args.strategy == "block":
        height, width = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
        together = padded.reshape(-(-rows // height), height, -(-columns // width), width).transpose(1, 2).flatten(2)
    else:
        together = {
            "tensor": weight.reshape(1, -1),
            "channel": weight.unsqueeze(1),
            "group": weight.reshape(rows, -1, args.group_size or 1),
        }[args.strategy]
    return calculate_qparams(together.amin(-1), together.amax(-1), args)


def int4_words(*words: int) -> list[int]:
    """Words as the int32 that they are stored as."""
    return [word - (1 << 32) if word >> 31 else word for word in words]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [{"strategy": "group", "group_size": 32}, {"strategy": "group", "group_size": 128}, {"strategy": "channel"}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [9, 13, 64, 2050])
def test_int4_is_what_compressed_tensors_makes_of_it(
    arguments: dict[str, Any], symmetric: bool, dtype: torch.dtype, rows: int
) -> None:
    args = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, **arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")
    weight = (torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)) * 0.02 + 0.01).to(dtype)
    weight[0, :32] = 0
    scale, zero_point = scales_of(weight, args)
    stored = PackedQuantizationCompressor.compress(
        {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}, scheme
    )
    assert ("weight_zero_point" in stored) != symmetric
    found = read(
        compressed(arguments | {"symmetric": symmetric}), {f"x.{name}": tensor for name, tensor in stored.items()}
    )
    assert list(found) == ["x.weight"]
    assert same(found["x.weight"], PackedQuantizationCompressor.decompress(stored, scheme)["weight"])
    assert found["x.weight"].dtype == dtype


def test_zero_points_of_a_few_rows() -> None:
    """One word for each group, row by row from its lowest bits."""
    codes = torch.randint(-8, 8, (3, 64), dtype=torch.int8)
    zeros = [[3, -8], [7, 0], [-1, 5]]
    words = [int4_words(sum((zeros[row][group] + 8) << 4 * row for row in range(3)))[0] for group in range(2)]
    scales = torch.tensor([[1.0, 2.0], [0.5, 0.25], [3.0, 1.5]])
    tensors = {
        "x.weight_packed": pack_to_int32(codes, 4),
        "x.weight_scale": scales,
        "x.weight_shape": torch.tensor([3, 64]),
        "x.weight_zero_point": torch.tensor([words], dtype=torch.int32),
    }
    expected = [
        [
            (int(codes[row, column]) - zeros[row][column // 32]) * float(scales[row, column // 32])
            for column in range(64)
        ]
        for row in range(3)
    ]
    found = read(compressed({"strategy": "group", "group_size": 32, "symmetric": False}), tensors)
    assert torch.equal(found["x.weight"], torch.tensor(expected))


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    rows = 4 * 253  # more than are worked on at a time
    blocks = torch.randint(0, 256, (3, rows, 5, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scales = (
        (torch.arange(rows) % 253).to(torch.uint8).reshape(1, rows, 1).expand(3, rows, 5).contiguous()
    )  # beyond, 6 is not a bfloat16
    name = "model.layers.0.mlp.experts.gate_up_proj"
    found = read(MXFP4, {f"{name}_blocks": blocks, f"{name}_scales": scales})
    assert found[name].shape == (3, 160, rows)
    assert same(found[name], convert_moe_packed_tensors(blocks, scales))


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("inside", [False, True])
def test_wherever_the_config_says_it(key: str, inside: bool) -> None:
    weight = torch.randn(4, 4).to(torch.float8_e4m3fn)
    tensors = {"x.weight": weight, "x.weight_scale_inv": torch.full((1, 1), 2.0)}
    said = {key: FP8 | {"weight_block_size": [128, 128]}}
    config: dict[str, Any] = (
        {"model_type": "x", "text_config": {"hidden_size": 4, **said}} if inside else {"model_type": "x", **said}
    )
    view = dequantized(InMemory(config, tensors), "here")
    assert view.config == ({"model_type": "x", "text_config": {"hidden_size": 4}} if inside else {"model_type": "x"})
    assert same(view.read(["x.weight"])["x.weight"], (weight.float() * 2).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("quantizer", "said"),
    [
        (
            quantized.fp8_blocks(1, 0, ending="_scale"),
            compressed({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized"),
        ),
        (quantized.int4(strategy="channel"), compressed({"strategy": "channel"})),
    ],
)
def test_a_quantized_copy_is_the_original(quantizer: quantized.Quantizer, said: dict[str, Any]) -> None:
    """GLM's FP8 releases quantize the output layer's copy in the draft layer, and not the output layer itself."""
    head = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    tensors = {"lm_head.weight": head} | {f"draft.weight{ending}": part for ending, part in quantizer(head)[0].items()}
    config = {"quantization_config": said}
    view = dequantized(
        InMemory(config, tensors), "here", {"draft.weight": "lm_head.weight", "absent.weight": "lm_head.weight"}
    )
    assert list(view.specs) == ["lm_head.weight", "draft.weight"]
    assert view.groups == [("lm_head.weight", "draft.weight")]
    found = view.read(["draft.weight"])["draft.weight"]
    assert torch.equal(found, head)
    assert not torch.equal(dequantized(InMemory(config, tensors), "here").read(["draft.weight"])["draft.weight"], head)
