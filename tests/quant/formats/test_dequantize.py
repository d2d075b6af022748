"""Dequantizing every format in every spelling: by hand, by slow formulas, by transformers and compressed-tensors."""

import json

import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support import quantized
from support.installed import since
from support.messages import refusal, text_with
from support.models import InMemory
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ckptkit.converters.foreign import MODELOPT_READ
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.quant.formats.dequantize import dequantized, describe_format, modelopt_format

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
GPT_OSS = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def read(quantization, tensors, **config):
    view = dequantized(InMemory({"quantization_config": quantization, **config}, tensors), "here")
    assert view.config == config
    return {name: tensor for names in view.groups for name, tensor in view.read(names).items()}


def same(left, right):
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


def fp8(*rows):
    return torch.tensor(rows, dtype=torch.uint8).view(torch.float8_e4m3fn)


def decoded(byte):
    """What a byte of float8_e4m3fn means, by the OCP 8-bit floating point specification."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 0xF, byte & 7
    return sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


ROWS, COLUMNS = 48, 96


def seeded():
    return torch.Generator().manual_seed(7)


def bytes_of(*shape, low=0, high=256):
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=seeded())


def float_groups(form, weights, **more):
    group = {"targets": ["Linear"], "weights": {"type": "float", "symmetric": True, **weights}, "format": form, **more}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


NVFP4 = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
MXFP4 = {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
MXFP8 = {"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
INPUTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}


def modelopt(algorithm, **more):
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


def scheme_of(weights, form):
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(type="float", **weights), format=form)


def unpacked(codes, exponents):
    """What transformers makes of the MXFP4 codes of a matrix."""
    return convert_moe_packed_tensors(codes.reshape(1, len(codes), -1, 16), exponents[None])[0].T


def nvfp4(divisor):
    """Any codes, and every block scale that is a number above zero."""
    scales = (torch.arange(ROWS * COLUMNS // 16) % 126 + 1).to(torch.uint8).view(torch.float8_e4m3fn)
    return {
        "x.weight_packed": bytes_of(ROWS, COLUMNS // 2),
        "x.weight_scale": scales.reshape(ROWS, COLUMNS // 16),
        "x.weight_global_scale": torch.tensor([divisor]),
        "x.input_global_scale": torch.tensor([3.0]),
    }


def test_every_fp8_byte():
    numbers = [byte for byte in range(256) if byte & 0x7F != 0x7F]
    found = read(
        FP8 | {"weight_block_size": [1, 256]}, {"x.weight": fp8(numbers), "x.weight_scale_inv": torch.ones(1, 1)}
    )
    assert same(found["x.weight"], torch.tensor([[decoded(byte) for byte in numbers]], dtype=torch.bfloat16))


SCALE_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu]
SIDE = st.integers(1, 300)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 4), max_size=2), SIDE, SIDE, SIDE, SIDE, st.sampled_from(SCALE_DTYPES))
def test_fp8_blocks_of_every_size(before, rows, columns, height, width, dtype):
    weight = torch.randn(*before, rows, columns, generator=seeded()).to(torch.float8_e4m3fn)
    grid = (*before, -(-rows // height), -(-columns // width))
    scales = (torch.rand(grid, generator=seeded()) * 0.01 + 1e-4).to(dtype)
    if dtype.itemsize > 1:
        scales.view(-1)[0] = 0  # what a quantizer makes of a block of zeros
    spread = scales.float().repeat_interleave(height, -2).repeat_interleave(width, -1)[..., :rows, :columns]
    found = read(
        FP8 | {"weight_block_size": [height, width], "scale_fmt": "ue8m0"},
        {"x.weight": weight, "x.weight_scale_inv": scales},
    )
    assert same(found["x.weight"], (weight.float() * spread).to(torch.bfloat16))


@pytest.mark.parametrize(("byte", "at"), [(0x7F, 0), (0xFF, 300_001), (0x7F, -1)])
def test_nan_is_found_wherever_it_is(byte, at):
    weight = torch.zeros(600, 1000, dtype=torch.uint8)
    weight.view(-1)[at] = byte
    tensors = {"x.weight": weight.view(torch.float8_e4m3fn), "x.weight_scale_inv": torch.ones(5, 8)}
    refusal(r"x\.weight .* NaN", read, FP8 | {"weight_block_size": [128, 128]}, tensors)


def test_fused_experts_and_exponents_as_bytes():
    weight = torch.randn(2, 64, 96).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[[120, 121, 130]], [[127, 126, 1]]], dtype=torch.uint8)
    tensors = {"mlp.experts.gate_up_proj": weight, "mlp.experts.gate_up_proj_scale_inv": exponents}
    found = read(FP8 | {"weight_block_size": [64, 32], "scale_fmt": "ue8m0"}, tensors)
    factors = 2.0 ** (exponents.double() - 127).repeat_interleave(32, 2)
    assert same(found["mlp.experts.gate_up_proj"], (weight.double() * factors).to(torch.bfloat16))


@pytest.mark.parametrize(("scale", "ending"), [(torch.tensor(0.003), "_scale_inv"), (torch.tensor([0.003]), "_scale")])
def test_one_fp8_scale_a_tensor(scale, ending):
    weight = torch.randn(5, 7).to(torch.float8_e4m3fn)
    tensors = {"x.weight": weight, "x.input_scale": torch.ones(1), f"x.weight{ending}": scale}
    found = read(FP8 | {"activation_scheme": "static"}, tensors)
    assert list(found) == ["x.weight"]
    assert same(found["x.weight"], (weight.float() * 0.003).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
def test_fp8_is_what_transformers_makes_of_it(dtype):
    weight = torch.randn(4, 96, 64).to(torch.float8_e4m3fn)
    scales = (torch.rand(4, 3, 2) * 0.01 + 1e-4).to(dtype)
    found = read(FP8 | {"weight_block_size": [32, 32]}, {"x.weight": weight, "x.weight_scale_inv": scales})
    assert same(found["x.weight"], Fp8Dequantize(None)._dequantize_one(weight, scales, torch.bfloat16))


BLOCKS = {"strategy": "block", "block_structure": [32, 48]}
UNEVEN_BLOCKS = since("compressed-tensors", (0, 20), "its compressor takes whole blocks only")


@pytest.mark.parametrize(
    ("arguments", "shape", "scales"),
    [
        ({"strategy": "tensor"}, (77, 50), (1,)),
        ({"strategy": "channel"}, (77, 50), (77, 1)),
        (BLOCKS, (64, 96), (2, 2)),
        pytest.param(BLOCKS, (77, 50), (3, 2), marks=UNEVEN_BLOCKS),
    ],
    ids=str,
)
def test_fp8_is_what_compressed_tensors_makes_of_it(arguments, shape, scales):
    form, weight = "float-quantized", torch.randn(shape, generator=seeded()).to(torch.float8_e4m3fn)
    stored = {"weight": weight, "weight_scale": torch.rand(scales, generator=seeded()).bfloat16()}
    config = float_groups(form, {"num_bits": 8, **arguments}, input_activations=None)
    found = read(config, {f"x.{name}": tensor for name, tensor in stored.items()} | {"norm.weight": torch.ones(3)})
    assert list(found) == ["x.weight", "norm.weight"]
    scheme = scheme_of({"num_bits": 8, **arguments}, form)
    assert same(found["x.weight"], FloatQuantizationCompressor.decompress(stored, scheme)["weight"].to(torch.bfloat16))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [{"strategy": "group", "group_size": 32}, {"strategy": "group", "group_size": 128}, {"strategy": "channel"}],
    ids=str,
)
def test_int4_is_what_compressed_tensors_makes_of_it(arguments, symmetric):
    for rows, dtype in ((9, torch.bfloat16), (13, torch.float16), (64, torch.float32), (2050, torch.bfloat16)):
        weight = (torch.randn(rows, 256, generator=seeded()) * 0.02 + 0.01).to(dtype)
        weight[0, :32] = 0
        stored, meant = quantized.int4(symmetric=symmetric, **arguments)(weight)
        assert ("_zero_point" in stored) != symmetric
        config = quantized.compressed_config("pack-quantized", **arguments, symmetric=symmetric)
        found = read(config, {f"x.weight{ending}": part for ending, part in stored.items()})
        assert list(found) == ["x.weight"]
        assert same(found["x.weight"], meant)


def test_mxfp4_is_what_transformers_makes_of_it():
    rows = 4 * 253  # more than are worked on at a time
    blocks = torch.randint(0, 256, (3, rows, 5, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    # Beyond 252, 6 is not a bfloat16.
    scales = (torch.arange(rows) % 253).to(torch.uint8).reshape(1, rows, 1).expand(3, rows, 5).contiguous()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    found = read(GPT_OSS, {f"{name}_blocks": blocks, f"{name}_scales": scales})
    assert found[name].shape == (3, 160, rows)
    assert same(found[name], convert_moe_packed_tensors(blocks, scales))


@pytest.mark.parametrize(("key", "inside"), [("quantization_config", True), ("compression_config", False)])
def test_wherever_the_config_says_it(key, inside):
    weight = torch.randn(4, 4).to(torch.float8_e4m3fn)
    tensors = {"x.weight": weight, "x.weight_scale_inv": torch.full((1, 1), 2.0)}
    said = {key: FP8 | {"weight_block_size": [128, 128]}}
    plain = {"model_type": "x", "text_config": {"hidden_size": 4}}
    config = {**plain, "text_config": plain["text_config"] | said} if inside else plain | said
    view = dequantized(InMemory(config, tensors), "here")
    assert view.config == plain
    assert same(view.read(["x.weight"])["x.weight"], (weight.float() * 2).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("quantizer", "said"),
    [
        (
            quantized.fp8_blocks(1, 0, ending="_scale"),
            quantized.compressed_config("float-quantized", num_bits=8, type="float", strategy="channel"),
        ),
        (quantized.int4(strategy="channel"), quantized.compressed_config("pack-quantized", strategy="channel")),
    ],
)
def test_a_quantized_copy_is_the_original(quantizer, said):
    """GLM's FP8 releases quantize the output layer's copy in the draft layer, and not the output layer itself."""
    head = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    tensors = {"lm_head.weight": head} | {f"draft.weight{ending}": part for ending, part in quantizer(head)[0].items()}
    config = {"quantization_config": said}
    view = dequantized(
        InMemory(config, tensors), "here", {"draft.weight": "lm_head.weight", "absent.weight": "lm_head.weight"}
    )
    assert list(view.specs) == ["lm_head.weight", "draft.weight"]
    assert view.groups == [("lm_head.weight", "draft.weight")]
    assert torch.equal(view.read(["draft.weight"])["draft.weight"], head)
    assert not torch.equal(dequantized(InMemory(config, tensors), "here").read(["draft.weight"])["draft.weight"], head)


@pytest.mark.parametrize("divisor", [28928.0, 28822.37, 2.0**14, 0.3])
def test_nvfp4_is_what_compressed_tensors_makes_of_it(divisor):
    stored, form = nvfp4(divisor), "nvfp4-pack-quantized"
    parts = {name.removeprefix("x."): tensor for name, tensor in stored.items()}
    meant = NVFP4PackedCompressor.decompress(parts, scheme_of(NVFP4, form))["weight"].to(torch.bfloat16)
    found = read(float_groups(form, NVFP4, input_activations=INPUTS), stored)
    assert list(found) == ["x.weight"]
    assert same(found["x.weight"], meant)
    if divisor == 2.0**14:  # ModelOpt multiplies instead: by a power of two both are exact
        tensors = {
            "x.weight": stored["x.weight_packed"],
            "x.weight_scale": stored["x.weight_scale"],
            "x.input_scale": torch.tensor(0.1),
            "x.k_scale": torch.tensor(0.1),
        }
        for algorithm, shape in (("NVFP4", ()), ("W4A16_NVFP4", (1,))):
            whole = {"x.weight_scale_2": torch.full(shape, 2.0**-14)}
            found = read(modelopt(algorithm, kv_cache_scheme={"type": "float"}), tensors | whole)
            assert list(found) == ["x.weight"]
            assert same(found["x.weight"], meant)


def test_quarks_nvfp4_is_modelopts_with_another_name_of_the_inputs_scale():
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
def test_mxfp4_is_what_compressed_tensors_and_transformers_make_of_it(bias):
    codes, scales = bytes_of(ROWS, COLUMNS // 2), bytes_of(ROWS, COLUMNS // 32, high=32) + bias
    parts = {"weight_packed": codes, "weight_scale": scales}
    by_transformers = unpacked(codes, scales)
    found = read(float_groups("mxfp4-pack-quantized", MXFP4), {f"x.{name}": tensor for name, tensor in parts.items()})
    assert same(found["x.weight"], by_transformers)
    if bias:  # 2^-127 is less than compressed-tensors can compute with
        meant = MXFP4PackedCompressor.decompress(parts, scheme_of(MXFP4, "mxfp4-pack-quantized"))["weight"]
        assert same(found["x.weight"], meant)
    quark = {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}}
    as_weight = {"x.weight": codes, "x.weight_scale": scales}
    for content in ({"quant_method": "quark", "global_quant_config": quark}, modelopt("MXFP4")):
        assert same(read(content, as_weight)["x.weight"], by_transformers)


def test_deepseek_v4s_experts_beside_its_fp8():
    codes, scales = bytes_of(ROWS, COLUMNS // 2), bytes_of(ROWS, COLUMNS // 32, low=100, high=140)
    meant = unpacked(codes, scales)
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
    text = describe_format({"quantization_config": content, "expert_dtype": "fp4"}, InMemory({}, tensors).specs)
    assert text == text_with("MXFP4 4-bit 32 1")
    assert text == text_with("FP8 float8_e4m3fn 128 128 1")


@since("compressed-tensors", (0, 17), "it has no MXFP8 before")
def test_mxfp8_is_what_compressed_tensors_makes_of_it():
    from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor

    weight = torch.randn(ROWS, COLUMNS, generator=seeded()).to(torch.float8_e4m3fn)
    scales = bytes_of(ROWS, COLUMNS // 32, low=60, high=200)
    parts = {"weight": weight, "weight_scale": scales}
    meant = MXFP8QuantizationCompressor.decompress(parts, scheme_of(MXFP8, "mxfp8-quantized"))["weight"]
    expected = meant.to(torch.bfloat16)
    stored = {f"x.{name}": tensor for name, tensor in parts.items()}
    miles = {"quant_method": "mxfp8", "fmt": "e4m3", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}
    for content in (float_groups("mxfp8-quantized", MXFP8), modelopt("MXFP8"), miles, {"quant_method": "mxfp8"}):
        assert same(read(content, stored)["x.weight"], expected)
    inverse = {"x.weight": weight, "x.weight_scale_inv": scales}
    assert same(read(miles, inverse)["x.weight"], expected)


@pytest.mark.parametrize(
    ("algorithm", "shape", "block"),
    [("FP8", (), (256, 384)), ("FP8_PER_CHANNEL_PER_TOKEN", (256,), (1, 384)), ("fp8_pb_wo", (2, 1, 3, 1), (128, 128))],
)
def test_modelopts_fp8(algorithm, shape, block):
    weight = torch.randn(256, 384, generator=seeded()).to(torch.float8_e4m3fn)
    scales = torch.rand(shape, generator=seeded()) * 0.01 + 1e-4
    factors = torch.kron(scales.reshape(256 // block[0], 384 // block[1]), torch.ones(block))
    found = read(modelopt(algorithm), {"x.weight": weight, "x.weight_scale": scales, "x.input_scale": torch.ones(())})
    assert same(found["x.weight"], (weight.float() * factors).to(torch.bfloat16))


def test_each_module_of_a_mixed_release_has_its_own_format():
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
    assert same(found["b.mlp.up.weight"], unpacked(codes, torch.full((16, 2), 127, dtype=torch.uint8)))


def test_groups_of_one_compressed_tensors_config():
    weight = torch.randn(64, 64, generator=seeded()).to(torch.float8_e4m3fn)
    rows = torch.rand(64, 1, generator=seeded())
    content = float_groups("nvfp4-pack-quantized", NVFP4)
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


def test_hf_quant_config_alone_says_how(tmp_path):
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
    refusal(r"hf_quant_config\.json has no object `quantization`", HfCheckpoint, tmp_path)


def test_every_algorithm_that_is_not_refused_is_read():
    for algorithm in MODELOPT_READ:
        layers = {"a": {"quant_algo": "FP8"}} if algorithm == "MIXED_PRECISION" else None
        assert modelopt_format(modelopt(algorithm, quantized_layers=layers)).layouts
