"""Back to INT4 bit for bit: releases made by compressed-tensors, by way of Megatron and without, on both grids."""

import json

import pytest
import torch
from support import models, quantized
from support.messages import refusal
from support.quant_weights import DTYPES, hard_weights

from ckptkit.app.api import convert, quantize
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.quant.formats.grids import dequantize
from ckptkit.quant.formats.grids import quantize as by_formula
from ckptkit.quant.formats.packing import Packed, pack, unpack, unpack_zero_point
from ckptkit.quant.formats.scheme import QuantScheme, quantization_config
from ckptkit.quant.kernels.dispatch import quantize_pack
from ckptkit.quant.planner import quantized as as_int4
from ckptkit.quant.schemes.interface import Request
from ckptkit.quant.schemes.w4a16 import StoredScheme, int4_scheme, requantize, stored_parts, stored_scheme
from ckptkit.verify.run import verify

SCHEMES = [
    QuantScheme(32, "qmax7"),
    QuantScheme(32, "minmax"),
    QuantScheme(64, "minmax", (), symmetric=False),
    QuantScheme(None, "minmax"),
    QuantScheme(None, "minmax", (), symmetric=False),
    QuantScheme(32, "minmax", (), True, "mse"),
    QuantScheme(32, "qmax7", scale_dtype=torch.float32),
]


def meant(packed, shape):
    zero_point = None if packed.zero_point is None else unpack_zero_point(packed.zero_point, packed.scale.shape)
    return dequantize(unpack(packed.words, shape), packed.scale, zero_point)


def equal(left, right):
    return all(one is other or torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_was_quantized_is_quantized_alike(scheme):
    for dtype in DTYPES:
        weight = hard_weights(dtype)[:-1]
        (before,) = quantize_pack([weight], scheme, ["a"])
        again = requantize(meant(before, weight.shape).to(dtype), before, scheme, "a")
        # A code of a group so small that its scale was epsilon is lost with its weight: 0 is its zero point.
        lost = (meant(before, weight.shape) == 0).all(1)
        assert torch.equal(again.scale, before.scale)
        assert torch.equal(again.words[~lost], before.words[~lost])
        assert torch.equal(meant(again, weight.shape), meant(before, weight.shape))
        assert int((~lost).sum()) > 45


def test_every_code_survives():
    """-8 too, which no fresh qmax7 scale would give back, and -0.0, which is the code of 0."""
    codes = (torch.arange(64) % 16 - 8).to(torch.int8).reshape(2, 32)
    before = Packed(pack(codes), torch.tensor([[0.013], [3.0]], dtype=torch.bfloat16), None)
    weight = meant(before, (2, 32))
    weight[0, 8] = -0.0
    assert equal(requantize(weight, before, QuantScheme(32, "qmax7"), "a"), before)
    assert not equal(quantize_pack([weight], QuantScheme(32, "qmax7"), ["a"])[0], before)


@pytest.mark.parametrize("scheme", [QuantScheme(32, "qmax7"), QuantScheme(32, "minmax", (), symmetric=False)])
def test_only_the_groups_that_changed_get_a_fresh_scale(scheme):
    torch.manual_seed(0)
    weight = (torch.randn(16, 128) * 0.02).bfloat16()
    (before,) = quantize_pack([weight], scheme, ["a"])
    changed = meant(before, weight.shape)
    changed[3, 40] += 0.001  # in the second group of row 3
    after = requantize(changed, before, scheme, "a")
    (fresh,) = quantize_pack([changed], scheme, ["a"])
    elsewhere = torch.ones(16, 4, dtype=torch.bool)
    elsewhere[3, 1] = False
    assert torch.equal(after.scale[elsewhere], before.scale[elsewhere])
    assert torch.equal(after.words.reshape(16, 4, 4)[elsewhere], before.words.reshape(16, 4, 4)[elsewhere])
    assert after.scale[3, 1] == fresh.scale[3, 1]
    assert torch.equal(after.words[3, 4:8], fresh.words[3, 4:8])
    if after.zero_point is not None and before.zero_point is not None and fresh.zero_point is not None:
        zeros = [unpack_zero_point(one.zero_point, (16, 4)) for one in (after, before, fresh)]
        assert torch.equal(zeros[0][elsewhere], zeros[1][elsewhere])
        assert zeros[0][3, 1] == zeros[2][3, 1]


def test_a_broken_scale_is_not_kept():
    weight, scheme = torch.zeros(1, 32), QuantScheme(32, "minmax")
    for scale in (0.0, float("nan"), float("inf")):
        before = Packed(torch.zeros(1, 4, dtype=torch.int32), torch.full((1, 1), scale), None)
        assert equal(requantize(weight, before, scheme, "a"), quantize_pack([weight], scheme, ["a"])[0])


def test_scales_keep_their_dtype_unless_another_is_asked_for():
    weight = (torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    codes, scale, _ = by_formula(weight, QuantScheme(32, "qmax7", scale_dtype=torch.float32))
    before, weight = Packed(pack(codes), scale, None), dequantize(codes, scale).bfloat16()
    assert equal(requantize(weight, before, QuantScheme(32, "qmax7"), "a"), before)
    after = requantize(weight, before, QuantScheme(32, "qmax7", scale_dtype=torch.bfloat16), "a")
    assert after.scale.dtype == torch.bfloat16


def test_empty_matrices_are_kept_and_scales_of_another_shape_refused():
    for shape in ((0, 64), (3, 0)):
        for scheme in [QuantScheme(32, "qmax7"), QuantScheme(None, "minmax", (), symmetric=False)]:
            (before,) = quantize_pack([torch.empty(shape)], scheme, ["a"])
            assert equal(requantize(torch.empty(shape), before, scheme, "a"), before)
    before = Packed(torch.zeros(1, 8, dtype=torch.int32), torch.ones(1, 1), None)
    refusal(r"\[1, 1\].*\[1, 2\]", requantize, torch.ones(1, 64), before, QuantScheme(32, "qmax7"), "a")


def test_a_reference_that_lacks_a_part_is_refused():
    reference = models.InMemory({}, {"x.weight_packed": torch.zeros(1, 4, dtype=torch.int32)})
    refusal(r"x\.weight_packed .* x\.weight_scale", stored_parts, reference, "x", symmetric=True)
    assert stored_parts(reference, "y", symmetric=True) is None


@pytest.fixture(scope="module")
def int4(releases, tmp_path_factory):
    """`int4(name, **arguments)`: a release that compressed-tensors' own compressor packed, as ckptkit would."""
    root = tmp_path_factory.mktemp("int4")

    def packed(name, **arguments):
        path = root / "-".join([name, *map(str, arguments.values())])
        if not path.exists():
            view, _ = as_int4(HfCheckpoint(releases(name)), QuantScheme(32, "qmax7"), Request("here"))
            modules = {key.removesuffix("_packed") for key in view.specs if key.endswith("_packed")}
            content = quantized.compressed_config("pack-quantized", **arguments)
            content["ignore"] = view.config["quantization_config"]["ignore"]
            edit = {"quantization_config": content}
            make = quantized.int4(**arguments)
            quantized.write(releases(name), path, modules.__contains__, make, lambda config: config | edit)
        return path

    return packed


ARGUMENTS = [
    {"strategy": "group", "group_size": 32, "symmetric": True},
    {"strategy": "channel", "group_size": None, "symmetric": True},
    {"strategy": "group", "group_size": 32, "symmetric": False},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_a_release_by_way_of_megatron(int4, tmp_path, arguments):
    """minmax to BF16 Megatron and back with `like`, and directly, keeps the bits; without `like` they differ."""
    source = int4("qwen2-tied", **arguments)
    scheme = int4_scheme(source)
    assert (scheme.group_size, scheme.symmetric) == (arguments["group_size"], arguments["symmetric"])
    convert(source, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back", quantize=scheme, like=source)
    assert models.unequal(source, tmp_path / "back") == []
    assert verify(tmp_path / "back", source=tmp_path / "megatron").findings == []
    written = quantize(source, tmp_path / "direct", scheme)
    assert models.unequal(source, tmp_path / "direct") == []
    assert written.dequantized.startswith("INT4")
    convert(tmp_path / "megatron", tmp_path / "fresh", quantize=scheme)
    assert models.unequal(source, tmp_path / "fresh")


def test_our_own_by_way_of_megatron(releases, tmp_path):
    quantize(releases("qwen3_moe"), tmp_path / "int4", QuantScheme(32, "qmax7"))
    convert(tmp_path / "int4", tmp_path / "megatron")
    scheme = int4_scheme(tmp_path / "int4")
    assert scheme == QuantScheme(32, "qmax7")
    convert(tmp_path / "megatron", tmp_path / "back", quantize=scheme, like=tmp_path / "int4")
    assert models.unequal(tmp_path / "int4", tmp_path / "back") == []
    left, right = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("int4", "back"))
    assert left == right


def test_other_groups_are_quantized_anew(int4, tmp_path):
    source = int4("qwen2-tied", **ARGUMENTS[0])
    quantize(source, tmp_path / "out", QuantScheme(None, "qmax7"))
    convert(source, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "expected", QuantScheme(None, "qmax7"))
    assert models.unequal(tmp_path / "out", tmp_path / "expected") == []


def config_of(scheme, **how):
    return {"quantization_config": quantization_config(scheme, **how)}


def test_what_a_config_records():
    full = QuantScheme(64, "minmax", (), False, "none", torch.float32)
    assert stored_scheme(config_of(full)) == StoredScheme(64, False, "minmax", torch.float32)
    kept = stored_scheme(config_of(QuantScheme(32, "qmax7"), kept_scales=True))
    assert kept == StoredScheme(32, True, "qmax7", None, kept_scales=True)
    content = quantized.compressed_config("pack-quantized", strategy="channel", symmetric=True)
    assert stored_scheme({"quantization_config": content}) == StoredScheme(None, True)
    assert stored_scheme({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}) is None
    assert stored_scheme({}) is None


def test_what_is_not_said_is_as_in_the_reference(tmp_path):
    assert int4_scheme() == int4_scheme(tmp_path) == QuantScheme(128, "qmax7")
    assert int4_scheme(symmetric=False) == QuantScheme(128, "minmax", (), symmetric=False)
    assert int4_scheme(search="mse") == QuantScheme(128, "minmax", (), True, "mse")
    full = QuantScheme(32, "minmax", (), False, "none", torch.float32)
    (tmp_path / "config.json").write_text(json.dumps(config_of(full)))
    assert int4_scheme(tmp_path) == full
    other = {"group_size": "channel", "grid": "qmax7", "symmetric": True, "scale_dtype": torch.bfloat16}
    assert int4_scheme(tmp_path, **other) == QuantScheme(None, "qmax7", scale_dtype=torch.bfloat16)
