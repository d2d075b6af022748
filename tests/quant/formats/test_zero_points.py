"""Zero points of experts in SGLang's layout: through SGLang's own conversion they are those of the matrix."""

from dataclasses import replace

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from support import models
from support.messages import refusal, text_with
from support.quantized import small_groups_allowed

from ckptkit.app.api import inspect, quantize
from ckptkit.core.errors import CkptkitError
from ckptkit.quant.formats.grids import dequantize
from ckptkit.quant.formats.grids import quantize as by_formula
from ckptkit.quant.formats.packing import check_zero_point_layout, pack_zero_point, to_sglang_zero_points
from ckptkit.quant.formats.scheme import QuantScheme
from ckptkit.verify.evidence.plain import plain

ASYMMETRIC = QuantScheme(32, "minmax", (), symmetric=False)
ROWS = QuantScheme(None, "minmax", (), symmetric=False)


def test_by_hand():
    """Eight rows of one group have zero points -8..-1, nibbles 0..7.

    From the lowest nibble: rows 0, 2, 4, 6, then 1, 3, 5, 7.
    """
    packed = pack_zero_point(torch.arange(-8, 0, dtype=torch.int8).unsqueeze(1))
    assert packed.tolist() == [[0x76543210]]
    assert to_sglang_zero_points(packed, 8, "a").tolist() == [[0x75316420]]


def test_refuses_rows_that_fill_no_word():
    refusal("12.*features.*8", to_sglang_zero_points, torch.zeros(2, 1, dtype=torch.int32), 12, "a")


def test_who_may_have_it():
    assert not check_zero_point_layout(QuantScheme(32, "minmax"), True, ("sglang", "vllm"))
    assert not check_zero_point_layout(ASYMMETRIC, False, ("sglang", "vllm"))
    assert check_zero_point_layout(ROWS, True, ("sglang",))
    assert check_zero_point_layout(replace(ASYMMETRIC, group_size=64), True, ("sglang",))
    assert not check_zero_point_layout(ASYMMETRIC, True, ("vllm",))
    for readers in [("sglang",), ("sglang", "vllm"), ("slime",), ()]:
        error = refusal("SGLang", check_zero_point_layout, ASYMMETRIC, True, readers)
        assert error.hint == text_with("--group-size 128" if readers == ("sglang",) else "--reader --reader")


def test_a_shared_expert_that_sglang_keeps_among_the_routed_ones(releases, tmp_path):
    """Its loader gives up on zero points of a Linear there: see test_sglang_formats.py, which leaves it out."""
    with pytest.raises(CkptkitError, match=r"shared_experts\.\w+\.weight: SGLang") as error:
        quantize(releases("glm4_moe"), tmp_path / "out", ROWS, readers=("sglang",))
    assert "--ignore 're:.*\\.mlp\\.shared_experts\\..*'" in error.value.hint
    assert not (tmp_path / "out").exists()


def test_a_mixture_of_experts(releases, tmp_path):
    """Refused for all readers. For SGLang alone it is written, with experts in its layout, and config.json says so."""
    source = releases("qwen3_moe")
    refusal("layout", quantize, source, tmp_path / "out", ASYMMETRIC)
    refusal("groups of 32", quantize, source, tmp_path / "out", ASYMMETRIC, readers=("sglang",))
    assert not (tmp_path / "out").exists()
    with small_groups_allowed():
        quantize(source, tmp_path / "out", ASYMMETRIC, readers=("sglang",))
    before, after = models.tensors(source), models.tensors(tmp_path / "out")
    for module, special in [("model.layers.1.mlp.experts.2.up_proj", True), ("model.layers.1.self_attn.o_proj", False)]:
        weight = before[f"{module}.weight"]
        packed = pack_zero_point(by_formula(weight, ASYMMETRIC).zero_point)
        expected = to_sglang_zero_points(packed, weight.shape[0], module) if special else packed
        assert torch.equal(after[f"{module}.weight_zero_point"], expected)
        shape = (weight.shape[1] // 32, weight.shape[0] // 8) if special else packed.shape
        assert after[f"{module}.weight_zero_point"].shape == shape
        parts = by_formula(weight, ASYMMETRIC)
        read = plain(tmp_path / "out").read([f"{module}.weight"])[f"{module}.weight"]
        assert torch.equal(read, dequantize(parts.codes, parts.scale, parts.zero_point))
    assert inspect(tmp_path / "out")["quantization"] == text_with("INT4 32")


def test_for_vllm_alone_experts_have_compressed_tensors_own_layout(releases, tmp_path):
    source, module = releases("qwen3_moe"), "model.layers.1.mlp.experts.2.up_proj"
    quantize(source, tmp_path / "out", ASYMMETRIC, readers=("vllm",))
    weight = models.tensors(source)[f"{module}.weight"]
    shape = torch.Size((weight.shape[0], weight.shape[1] // 32))
    stored = models.tensors(tmp_path / "out")[f"{module}.weight_zero_point"]
    read = unpack_from_int32(stored, 4, shape, packed_dim=0)
    assert torch.equal(read, by_formula(weight, ASYMMETRIC).zero_point)
    assert "experts_zero_points" not in (tmp_path / "out" / "config.json").read_text()


def test_an_unknown_layout_of_zero_points_is_refused(releases, tmp_path):
    quantize(releases("qwen3_moe"), tmp_path / "out", ROWS, readers=("sglang",))
    config = tmp_path / "out" / "config.json"
    config.write_text(config.read_text().replace('"experts_zero_points": "sglang"', '"experts_zero_points": "awq"'))
    refusal("experts_zero_points 'awq' is not supported", plain, tmp_path / "out")
