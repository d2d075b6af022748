"""Layouts that engines repack into, of layers written here: what is right passes, and what is wrong is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import models
from support.messages import text_with
from support.quantized import fp8_blocks as quantized_blocks
from support.quantized import int4
from torch import Tensor, nn

from ckptkit.verify.witnesses.loading.engine import ModelBuild
from ckptkit.verify.witnesses.loading.examine import examine
from ckptkit.verify.witnesses.loading.job import LoadReport, Observation
from ckptkit.verify.witnesses.loading.layouts.layout import (
    LayerOutcome,
    Layout,
    not_kept,
    reordered,
    swapped_halves,
    unknown_layout,
)
from ckptkit.verify.witnesses.loading.layouts.marlin import marlin, marlin_scales, marlin_weight
from ckptkit.verify.witnesses.loading.layouts.values import absorbed, fp8_blocks, products
from ckptkit.verify.witnesses.process.exit_report import PhaseLog
from ckptkit.verify.witnesses.sglang import adapter

BLOCK = (16, 16)
PAIR = [("weight", "weight_scale_inv")]


def module(**parameters: Tensor) -> nn.Module:
    found = nn.Module()
    for name, tensor in parameters.items():
        found.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return found


def weight(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).bfloat16() / 50


def in_fp8() -> nn.Module:
    parts, _ = quantized_blocks(*BLOCK)(weight(40, 48))
    return module(weight=parts[""], weight_scale_inv=parts["_scale_inv"])


def power_of_two(layer: nn.Module, factor: float = 1.0) -> None:
    """Rounds to the smallest power of two that holds each block, times `factor`: block by block, in float64."""
    codes, scales = layer.weight.data.double(), layer.weight_scale_inv.data
    for down in range(scales.shape[0]):
        for right in range(scales.shape[1]):
            at = slice(16 * down, 16 * down + 16), slice(16 * right, 16 * right + 16)
            loaded = codes[at] * scales[down, right].double()
            scale = torch.exp2(torch.ceil(torch.log2(loaded.abs().max() / 448))) * factor
            layer.weight.data[at] = (loaded / scale).float().to(torch.float8_e4m3fn)
            scales[down, right] = scale


def test_fp8_blocks_as_loaded_pass() -> None:
    layer = in_fp8()
    assert fp8_blocks(BLOCK, PAIR)(layer)[1]() == LayerOutcome()


def test_fp8_blocks_rounded_to_powers_of_two_pass_and_are_told() -> None:
    layer = in_fp8()
    _, compare = fp8_blocks(BLOCK, PAIR)(layer)
    power_of_two(layer)
    outcome = compare()
    assert (outcome.differences, outcome.unknown) == ({}, None)
    assert outcome.requantized.keys() == {"weight"}
    assert 0 < outcome.requantized["weight"] <= 1 / 16


def lost_code(layer: nn.Module) -> None:
    layer.weight.data[3, 4] = 0


def doubled_scale(layer: nn.Module) -> None:
    layer.weight_scale_inv.data[1, 2] *= 2


def coarse(layer: nn.Module) -> None:
    power_of_two(layer, 4.0)


def clipped(layer: nn.Module) -> None:
    power_of_two(layer, 0.25)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lost_code, "1 of 1920 values differ, first at [3, 4]: 0.0 instead of "),
        (doubled_scale, "256 of 1920 values differ, first at [16, 32]: "),  # of a block
        (coarse, "1920 of 1920 values differ"),
        (clipped, "1920 of 1920 values differ"),
    ],
)
def test_fp8_blocks_of_other_values_are_named(change: object, what: str) -> None:
    layer = in_fp8()
    _, compare = fp8_blocks(BLOCK, PAIR)(layer)
    change(layer)  # type: ignore[operator]
    ((place, difference),) = compare().differences.items()
    assert place == "weight"
    assert difference.startswith(what)


def test_fp8_scales_in_a_kernels_own_layout_are_not_judged() -> None:
    layer = in_fp8()
    _, compare = fp8_blocks(BLOCK, PAIR)(layer)
    layer.weight_scale_inv = nn.Parameter(torch.zeros(2, 3, dtype=torch.int32), requires_grad=False)
    assert compare().unknown == text_with("weight_scale_inv layout")


def packed(symmetric: bool = True) -> tuple[nn.Module, Tensor]:
    """A layer in INT4 groups of 32, by compressed-tensors itself, and what it stands for."""
    parts, meant = int4(strategy="group", group_size=32, symmetric=symmetric)(weight(64, 128))
    names = {"_packed": "weight_packed", "_scale": "weight_scale", "_zero_point": "weight_zero_point"}
    return module(**{names[name]: part for name, part in parts.items() if name in names}), meant


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("wrong", [None, (5, 6), float("nan")])
def test_a_layer_is_compared_by_its_products(symmetric: bool, wrong: object) -> None:
    layer, meant = packed(symmetric)
    held = meant.clone()
    if isinstance(wrong, tuple):
        held[wrong] += layer.weight_scale[5, 0]  # one step
    elif wrong is not None:
        held[5, 6] = wrong  # type: ignore[call-overload]
    outcome = products(lambda inputs: inputs @ held.t(), torch.bfloat16)(layer)[1]()
    assert list(outcome.differences) == ["weight_packed"] * (wrong is not None)
    for difference in outcome.differences.values():
        count = 128 if wrong != (5, 6) else 1  # NaN makes a whole row of products NaN
        assert difference == text_with(f"{count} 8192 [5")


def test_products_of_a_form_that_is_not_known_are_not_judged() -> None:
    layer = module(weight=torch.zeros(4, 4, dtype=torch.int8))
    outcome = products(lambda inputs: inputs, torch.bfloat16)(layer)[1]()
    assert outcome.unknown == text_with("kernel")


@pytest.mark.parametrize("form", ["plain", "int4", "fp8"])
@pytest.mark.parametrize("fault", [None, "W_UK_T", "W_UV"])
def test_what_latent_attention_absorbs_is_compared(form: str, fault: str | None) -> None:
    """Two heads of 12 rows of keys and 20 of values, each of 128 latent inputs."""
    block = None
    if form == "int4":
        layer, meant = packed()
    elif form == "fp8":
        block = BLOCK
        parts, meant = quantized_blocks(*BLOCK)(weight(64, 128))
        layer = module(weight=parts[""], weight_scale_inv=parts["_scale_inv"])
    else:
        meant = weight(64, 128)
        layer = module(weight=meant)
    _, compare = absorbed(layer, 2, 12, block)(attention := nn.Module())
    if form == "int4":
        layer.weight_packed.data.zero_()  # repacked meanwhile
    heads = meant.reshape(2, 32, 128)
    attention.W_UK_T, attention.W_UV = heads[:, :12].clone(), heads[:, 12:].transpose(1, 2).clone()
    if fault:
        getattr(attention, fault)[1, 2, 3] += 0.1
    outcome = compare()
    assert list(outcome.differences) == [fault] * (fault is not None)
    for difference in outcome.differences.values():
        assert "1 of " in difference
        assert "elements differ from kv_b_proj's, first at [1, 2, 3]" in difference


def repacked(layer: nn.Module) -> None:
    """Into Marlin's layout, as an engine does with sizes that are whole tiles."""
    words, scales = layer.weight_packed.data.t(), layer.weight_scale.data.t()
    layer.weight_packed = nn.Parameter(marlin_weight(words), requires_grad=False)
    layer.weight_scale = nn.Parameter(marlin_scales(scales)[0], requires_grad=False)


def next_bit(scales: Tensor, row: int, group: int) -> Tensor:
    """Scales of which one is the next larger number of bfloat16."""
    changed = scales.bfloat16()
    changed.view(torch.int16)[row, group] += 1
    return changed


def test_a_scale_off_by_a_bit_is_seen_in_a_known_layout_and_not_in_products() -> None:
    """So Marlin's layout is compared, and only kernels with an unknown one are run."""
    layer, meant = packed()
    layer.weight_scale.data = layer.weight_scale.data.bfloat16()
    _, by_layout = marlin()(layer)
    _, by_products = products(lambda inputs: (inputs.float() @ held.t()).to(inputs.dtype), torch.bfloat16)(layer)
    exact = layer.weight_scale.data
    layer.weight_scale.data = next_bit(exact, 5, 0)
    held = meant.float()
    held[5, :32] *= layer.weight_scale[5, 0].float() / exact[5, 0].float()
    assert by_products() == LayerOutcome()
    repacked(layer)
    assert [one[:8] for one in by_layout().differences.values()] == ["1 of 256"]


def test_an_fp8_scale_off_by_a_bit_is_seen_in_its_blocks_and_not_in_products() -> None:
    """A column that a kernel computes has 8 bits of a scale's 24."""
    layer = in_fp8()
    _, by_blocks = fp8_blocks(BLOCK, PAIR)(layer)
    _, by_products = products(lambda inputs: (inputs.float() @ held.t()).to(inputs.dtype), torch.bfloat16, BLOCK)(layer)
    layer.weight_scale_inv.data.view(torch.int32)[1, 2] += 1
    scales = layer.weight_scale_inv.repeat_interleave(16, 0)[:40].repeat_interleave(16, 1)
    held = layer.weight.data.float() * scales
    assert by_products() == LayerOutcome()
    assert [one.partition(",")[0] for one in by_blocks().differences.values()] == ["256 of 1920 values differ"]


def test_one_hot_routing_does_not_show_every_bit_of_experts() -> None:
    """What an expert computes of unit vectors is rounded by more than a wrong scale changes it."""
    draw = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(-7, 8, (rows, columns // 32, 32), generator=draw).float()
        return codes, (torch.rand(rows, columns // 32, generator=draw) * 0.01 + 0.001).bfloat16()

    def values(codes: Tensor, scales: Tensor) -> Tensor:
        return (codes * scales.float().unsqueeze(-1)).flatten(1)

    def outputs(gate: Tensor, up: Tensor, down: Tensor, dtype: torch.dtype) -> Tensor:
        """Of every unit vector: [inputs, outputs]; what a kernel holds between its steps is in `dtype`."""
        left, right, last = (one.to(dtype).float() for one in (gate, up, down))
        between = (nn.functional.silu(left.t()).to(dtype).float() * right.t()).to(dtype).float()
        return (between @ last.t()).to(dtype).float()

    gate, up, down = matrix(256, 128), matrix(256, 128), matrix(128, 256)
    exact = outputs(values(*gate), values(*up), values(*down), torch.float32)
    rounding = (outputs(values(*gate), values(*up), values(*down), torch.bfloat16) - exact).abs().max()
    of_gate = outputs(values(gate[0], next_bit(gate[1], 5, 1)), values(*up), values(*down), torch.float32)
    of_down = outputs(values(*gate), values(*up), values(down[0], next_bit(down[1], 5, 1)), torch.float32)
    assert 0 < (of_gate - exact).abs().max() < rounding
    assert 0 < (of_down - exact).abs().max() < rounding


def test_padding_that_is_not_zero_is_named() -> None:
    layer, _ = packed()
    _, compare = marlin()(layer)
    repacked(layer)
    assert compare() == LayerOutcome()
    wider = nn.functional.pad(layer.weight_scale.data, (0, 64))
    wider[0, 70] = 1
    layer.weight_scale = nn.Parameter(wider, requires_grad=False)
    (difference,) = compare().differences.values()
    assert difference.startswith("1 of 512 elements differ, first at [0, 70]: 1.0 instead of 0.0")


def test_a_parameter_that_is_taken_away_is_named() -> None:
    layer, _ = packed()
    _, compare = marlin()(layer)
    repacked(layer)
    del layer.weight_scale
    assert compare().differences == {"weight_scale": text_with("there")}


def test_gate_and_up_in_the_other_order() -> None:
    layer = module(w13_weight=torch.randn(2, 8, 3))
    _, compare = reordered({"w13_weight": swapped_halves})(layer)
    loaded = layer.w13_weight.data.clone()
    layer.w13_weight.data = torch.cat([loaded[:, 4:], loaded[:, :4]], 1)
    assert compare() == LayerOutcome()
    layer.w13_weight.data[1] = loaded[1]
    assert list(compare().differences) == ["w13_weight[1]"]


def test_layouts_that_judge_nothing() -> None:
    params, compare = unknown_layout("Humming")(nn.Module())
    assert (params, compare().unknown) == ((), text_with("Humming"))
    assert not_kept(["k_scale"])(nn.Module())[1]() == LayerOutcome()


def layout_of(layer: nn.Module) -> Layout:
    found = adapter.layout(layer)
    assert found is not None
    return found


def test_sglang_fp8_layers_are_compared_by_value() -> None:
    layer = in_fp8()
    layer.quant_method = SimpleNamespace(quant_config=SimpleNamespace(weight_block_size=list(BLOCK)))  # type: ignore[assignment]
    _, compare = layout_of(layer)(layer)
    power_of_two(layer)
    assert compare().differences == {}
    lost_code(layer)
    assert len(compare().differences) == 1


def test_sglang_fp8_scales_without_a_block_size_are_not_known() -> None:
    assert layout_of(in_fp8())(in_fp8())[0] == ()


def test_the_largest_change_of_all_ranks_is_told() -> None:
    reports = [
        LoadReport("0", "m", "cuda", "bfloat16", repacked=(), requantized={"a": change, f"{rank}": 0.01})
        for rank, change in enumerate((0.02, 0.03))
    ]
    assert LoadReport.merged(reports).requantized == {"a": 0.03, "0": 0.01, "1": 0.01}


# What the witness says of layers that their quantization methods change after loading.
Weights = Iterator[tuple[str, Tensor]]


class Method:
    """A quantization method."""

    def __init__(self, process: Callable[[nn.Module], None]) -> None:
        self.process_weights_after_loading = process


def nothing(layer: nn.Module) -> None:
    """Leaves the layer as it is."""


class Model(nn.Module):
    """Two layers and a norm, which has no method; `head` is the first layer's weight once more."""

    def __init__(self, process: Callable[[nn.Module], None], of_head: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)
        self.norm, self.head = nn.LayerNorm(6, bias=False), nn.Linear(6, 4, bias=False)
        self.head.weight = self.one.weight
        self.one.quant_method = Method(nothing)  # type: ignore[assignment]
        self.two.quant_method = Method(process)  # type: ignore[assignment]
        self.head.quant_method = Method(of_head)  # type: ignore[assignment]

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def examined(
    tmp_path: Path, process: Callable[[nn.Module], None], of_head: Callable[[nn.Module], None] = nothing
) -> LoadReport:
    tensors = {"one.weight": torch.randn(4, 6), "two.weight": torch.randn(4, 6), "norm.weight": torch.randn(6)}
    with PhaseLog(tmp_path / "report") as phases:
        config = models.configs()["qwen2-tied"].to_dict()
        build = ModelBuild(tmp_path, tmp_path, config, reference=lambda: iter(tensors.items()))
        model, device = Model(process, of_head), torch.device("cuda")
        report = examine(adapter, build, phases, model, iter(tensors.items()), device).report
    assert list(report.equal) == list(tensors)
    return report


def the_same(layer: nn.Module) -> None:
    """A parameter of its own with the same bits."""
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def in_place(layer: nn.Module) -> None:
    layer.weight.data[2, 3] = 7.0


def replaced(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous())


def cast(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().bfloat16())


def deleted(layer: nn.Module) -> None:
    del layer.weight


@pytest.mark.parametrize("process", [nothing, the_same])
def test_what_keeps_its_bits_is_fine(tmp_path: Path, process: Callable[[nn.Module], None]) -> None:
    report = examined(tmp_path, process)
    assert (report.repacked, report.repacked_seen) == ((), 2)


@pytest.mark.parametrize(
    ("process", "what"),
    [
        (in_place, "1 of 24 elements differ, first at [2, 3]: 7.0 instead of"),
        (replaced, "elements differ"),
        (cast, "SGLang has made it [4, 6] bfloat16"),
        (deleted, "SGLang taken"),
    ],
)
def test_what_changed_is_named(tmp_path: Path, process: Callable[[nn.Module], None], what: str) -> None:
    (found,) = examined(tmp_path, process).repacked or ()
    assert isinstance(found, Observation)
    assert (found.tensor, found.param) == ("two.weight", "two.weight")
    assert found.what == text_with(what)


def test_a_weight_that_two_layers_share_is_named_once(tmp_path: Path) -> None:
    (found,) = examined(tmp_path, nothing, of_head=in_place).repacked or ()
    assert found.tensor == "one.weight"
