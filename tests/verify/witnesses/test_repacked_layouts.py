"""Layouts that engines repack into, of layers written here: what is right passes, and what is wrong is named."""

import math
from types import SimpleNamespace

import pytest
import torch
from support import models
from support.messages import text_with
from support.quantized import fp8_blocks as quantized_blocks
from support.quantized import int4
from torch import nn

from ckptkit.verify.core.skip import CannotCheck
from ckptkit.verify.witnesses.loading.engine import ModelBuild
from ckptkit.verify.witnesses.loading.examine import examine
from ckptkit.verify.witnesses.loading.job import LoadReport
from ckptkit.verify.witnesses.loading.layouts.layout import (
    absorbed,
    fp8_blocks,
    not_kept,
    products,
    reordered,
    swapped_halves,
    unknown_layout,
)
from ckptkit.verify.witnesses.loading.layouts.marlin import marlin, marlin_scales, marlin_weight
from ckptkit.verify.witnesses.process.exit_report import ExitReport
from ckptkit.verify.witnesses.sglang import adapter

BLOCK = (16, 16)
PAIR = [("weight", "weight_scale_inv")]


def module(**parameters):
    found = nn.Module()
    for name, tensor in parameters.items():
        found.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return found


def weight(rows, columns):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).bfloat16() / 50


def in_fp8():
    parts, _ = quantized_blocks(*BLOCK)(weight(40, 48))
    return module(weight=parts[""], weight_scale_inv=parts["_scale_inv"])


def differences(compare):
    return {seen.param: seen.what for seen in compare() if seen.change is None}


def why_unknown(compare):
    with pytest.raises(CannotCheck) as raised:
        list(compare())
    return str(raised.value)


def power_of_two(layer, factor=1.0):
    """Rounds to the smallest power of two that holds each block, times `factor`: block by block, in float64."""
    codes, scales = layer.weight.data.double(), layer.weight_scale_inv.data
    for down in range(scales.shape[0]):
        for right in range(scales.shape[1]):
            at = slice(16 * down, 16 * down + 16), slice(16 * right, 16 * right + 16)
            loaded = codes[at] * scales[down, right].double()
            scale = torch.exp2(torch.ceil(torch.log2(loaded.abs().max() / 448))) * factor
            layer.weight.data[at] = (loaded / scale).float().to(torch.float8_e4m3fn)
            scales[down, right] = scale


def test_fp8_blocks_as_loaded_or_rounded_to_powers_of_two_pass():
    layer = in_fp8()
    _, compare = fp8_blocks(BLOCK, PAIR)(layer)
    assert list(compare()) == []
    power_of_two(layer)
    (seen,) = compare()
    assert seen.param == "weight"
    assert 0 < seen.change <= 1 / 16


def lost_code(layer):
    layer.weight.data[3, 4] = 0


@pytest.mark.parametrize(
    ("change", "count", "first"),
    [
        (lost_code, 1, "[3, 4]"),
        (lambda layer: layer.weight_scale_inv.data.view(torch.int32)[1, 2].add_(1), 256, "[16, 32]"),
        (lambda layer: power_of_two(layer, 4.0), 1920, "[0, 0]"),  # coarse
        (lambda layer: power_of_two(layer, 0.25), 1920, "[0, 0]"),  # clipped
    ],
)
def test_fp8_blocks_of_other_values_are_named(change, count, first):
    layer = in_fp8()
    _, compare = fp8_blocks(BLOCK, PAIR)(layer)
    change(layer)
    ((place, difference),) = differences(compare).items()
    assert place == "weight"
    assert difference.startswith(f"{count} of 1920 ")
    assert first in difference


def packed(symmetric=True):
    """A layer in INT4 groups of 32, by compressed-tensors itself, and what it stands for."""
    parts, meant = int4(strategy="group", group_size=32, symmetric=symmetric)(weight(64, 128))
    names = {"_packed": "weight_packed", "_scale": "weight_scale", "_zero_point": "weight_zero_point"}
    return module(**{names[name]: part for name, part in parts.items() if name in names}), meant


@pytest.mark.parametrize(("symmetric", "fault"), [(True, None), (False, None), (False, "a step"), (True, "nan")])
def test_a_layer_is_compared_by_its_products(symmetric, fault):
    layer, meant = packed(symmetric)
    held = meant.clone()
    if fault:
        held[5, 6] = math.nan if fault == "nan" else held[5, 6] + layer.weight_scale[5, 0]
    compare = products(lambda inputs: inputs @ held.t(), torch.bfloat16)(layer)[1]
    count = 128 if fault == "nan" else 1  # NaN makes a whole row of products NaN
    assert differences(compare) == ({"weight_packed": text_with(f"{count} 8192 [5")} if fault else {})


@pytest.mark.parametrize("form", ["plain", "int4", "fp8"])
def test_what_latent_attention_absorbs_is_compared(form):
    layer, meant = module(weight=weight(64, 128)), weight(64, 128)
    if form == "int4":
        layer, meant = packed()
    elif form == "fp8":
        parts, meant = quantized_blocks(*BLOCK)(weight(64, 128))
        layer = module(weight=parts[""], weight_scale_inv=parts["_scale_inv"])
    _, compare = absorbed(layer, 2, 12, BLOCK if form == "fp8" else None)(attention := nn.Module())
    if form == "int4":
        layer.weight_packed.data.zero_()  # repacked meanwhile
    heads = meant.reshape(2, 32, 128)
    attention.W_UK_T, attention.W_UV = heads[:, :12].clone(), heads[:, 12:].transpose(1, 2).clone()
    assert list(compare()) == []
    attention.W_UK_T[1, 2, 3] += 0.1
    assert differences(compare) == {"W_UK_T": text_with("1 [1")}
    attention.W_UV[1, 3, 2] += 0.1
    assert differences(compare) == {"W_UK_T": text_with("1 [1"), "W_UV": text_with("1 [1")}


def padded(layer):
    layer.weight_scale = nn.Parameter(nn.functional.pad(layer.weight_scale.data, (0, 64)), requires_grad=False)


def padded_with_a_number(layer):
    padded(layer)
    layer.weight_scale.data[0, 70] = 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (padded, None),
        (padded_with_a_number, "1 512 [0 70] 1.0 0.0"),
        (lambda layer: layer.weight_scale.data.view(torch.int16)[3, 5].add_(1), "1 256 [3 5]"),
        (lambda layer: delattr(layer, "weight_scale"), "removed"),
    ],
)
def test_marlins_layout_is_compared_bit_by_bit_with_its_padding(change, words):
    """As an engine repacks into it, with sizes that are whole tiles."""
    layer, _ = packed()
    layer.weight_scale.data = layer.weight_scale.data.bfloat16()
    _, compare = marlin()(layer)
    layer.weight_packed = nn.Parameter(marlin_weight(layer.weight_packed.data.t()), requires_grad=False)
    layer.weight_scale = nn.Parameter(marlin_scales(layer.weight_scale.data.t())[0], requires_grad=False)
    assert list(compare()) == []
    change(layer)
    assert differences(compare) == ({"weight_scale": text_with(words)} if words else {})


def test_gate_and_up_in_the_other_order():
    layer = module(w13_weight=torch.randn(2, 8, 3))
    _, compare = reordered({"w13_weight": swapped_halves})(layer)
    loaded = layer.w13_weight.data.clone()
    layer.w13_weight.data = torch.cat([loaded[:, 4:], loaded[:, :4]], 1)
    assert list(compare()) == []
    layer.w13_weight.data[1] = loaded[1]
    assert list(differences(compare)) == ["w13_weight[1]"]


def test_layouts_that_judge_nothing():
    params, compare = unknown_layout("Humming")(nn.Module())
    assert (params, why_unknown(compare)) == ((), text_with("Humming"))
    assert list(not_kept(["k_scale"])(nn.Module())[1]()) == []
    of_kernel = products(lambda inputs: inputs, torch.bfloat16)(module(weight=torch.zeros(4, 4, dtype=torch.int8)))
    assert why_unknown(of_kernel[1]) == text_with("kernel")
    layer = in_fp8()
    _, compare = fp8_blocks(BLOCK, PAIR)(layer)
    layer.weight_scale_inv = nn.Parameter(torch.zeros(2, 3, dtype=torch.int32), requires_grad=False)
    assert why_unknown(compare) == text_with("weight_scale_inv layout")


def test_sglang_fp8_layers_are_compared_by_value_where_their_blocks_are_known():
    layer = in_fp8()
    assert adapter.layout(layer)(layer)[0] == ()
    layer.quant_method = SimpleNamespace(quant_config=SimpleNamespace(weight_block_size=list(BLOCK)))
    _, compare = adapter.layout(layer)(layer)
    power_of_two(layer)
    assert differences(compare) == {}
    lost_code(layer)
    assert len(differences(compare)) == 1


def test_the_largest_change_of_all_ranks_is_told():
    reports = [
        LoadReport("0", "m", "cuda", "bfloat16", repacked=(), requantized={"a": change, f"{rank}": 0.01})
        for rank, change in enumerate((0.02, 0.03))
    ]
    assert LoadReport.merged(reports).requantized == {"a": 0.03, "0": 0.01, "1": 0.01}


# What the witness says of layers that their quantization methods change after loading.
class Model(nn.Module):
    """Two layers and a norm, which has no method; `head` is the first layer's weight once more."""

    def __init__(self, change, of_head):
        super().__init__()
        self.one, self.two = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)
        self.norm, self.head = nn.LayerNorm(6, bias=False), nn.Linear(6, 4, bias=False)
        self.head.weight = self.one.weight
        for layer, after in ((self.one, nothing), (self.two, change), (self.head, of_head)):
            layer.quant_method = SimpleNamespace(process_weights_after_loading=after)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def nothing(layer):
    """Leaves the layer as it is."""


def in_place(layer):
    layer.weight.data[2, 3] = 7.0


def made_of(change):
    return lambda layer: setattr(layer, "weight", nn.Parameter(change(layer.weight.detach())))


@pytest.mark.parametrize(
    ("change", "of_head", "named", "words"),
    [
        (nothing, nothing, [], ""),
        (made_of(torch.clone), nothing, [], ""),
        (in_place, nothing, ["two.weight"], "1 24 [2 3] 7.0"),
        (made_of(lambda weight: weight.t().contiguous()), nothing, ["two.weight"], "elements"),
        (made_of(torch.Tensor.bfloat16), nothing, ["two.weight"], "[4 6] bfloat16"),
        (lambda layer: delattr(layer, "weight"), nothing, ["two.weight"], "SGLang"),
        (nothing, in_place, ["one.weight"], "1 24"),  # a weight that two layers share
    ],
)
def test_what_changed_after_loading_is_named_once(change, of_head, named, words, tmp_path):
    tensors = {"one.weight": torch.randn(4, 6), "two.weight": torch.randn(4, 6), "norm.weight": torch.randn(6)}
    config = models.configs()["qwen2-tied"].to_dict()
    build = ModelBuild(tmp_path, tmp_path, config, reference=lambda: iter(tensors.items()))
    with ExitReport(tmp_path / "report") as phases:
        model, weights = Model(change, of_head), iter(tensors.items())
        report = examine(adapter, build, phases, model, weights, torch.device("cuda")).report
    assert list(report.equal) == list(tensors)
    assert report.repacked_seen == 2
    assert [one.tensor for one in report.repacked or ()] == named
    assert all(one.what == text_with(words) for one in report.repacked or ())
