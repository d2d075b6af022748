"""INT4 and FP8 blocks of every model type into real SGLang: clean, and broken ones named."""

from pathlib import Path

import pytest
from support import models
from support.messages import text_with
from support.nightly import collected, daily
from support.sglang_cells import BF16, CLEAN, FP8, Cell, checkpoint, judged, values
from support.sglang_families import EXPERT
from support.sglang_formats import LABELS, NOT_IN_FP8, write_all
from support.sglang_runs import LOST_PARTS, Case, clean, reported

from ckptkit.verify.checks.witnesses.loading import why_no_scale
from ckptkit.verify.witnesses.sglang.facts import SGLANG

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

# Of the matrix that `make sglang-matrix` runs: a dense model, one with experts, one with latent attention in the larger
# groups and each way, a vision tower, experts that nobody knows one by one, and FP8 of linear attention.
CELLS = {
    str(cell): cell
    for cell in (
        Cell("qwen3-untied", "wide", "INT4 64 qmax7", "HF"),
        Cell("qwen2-tied", "wide", "INT4 128 zero points", "Megatron"),
        Cell("qwen3_moe", "wide", "INT4 128 minmax", "HF"),
        Cell("qwen3_moe", "wide", "INT4 64 zero points", "Megatron"),
        Cell("deepseek_v3", "wide", "INT4 64 minmax", "HF"),
        Cell("deepseek_v3", "wide", "INT4 128 qmax7", "Megatron"),
        Cell("qwen2_5_vl", "odd", BF16, "Megatron"),
        Cell("gpt_oss", "wide", BF16, "Megatron"),
        Cell("qwen3_5", "odd", FP8, "HF"),
    )
}
# One with experts, one with latent attention, and those that are like no other. Each has dense layers too.
DAILY = (
    *("groups qwen3_moe", "groups deepseek_v3", "groups qwen3_vl_moe", "rows glm4_moe", "zero points minimax_m2"),
    "fp8 qwen3_moe",
)
BROKEN = ("qwen2-tied", "qwen3_moe", "deepseek_v3", "minimax_m2", "qwen3_vl_moe")


@pytest.fixture(scope="module")
def cases(request, tmp_path_factory):
    root, needed = tmp_path_factory.mktemp("formats"), collected(request, "label") | {"fp8 qwen3_moe"}
    names = collected(request, "name") & {*BROKEN}
    needed |= {f"groups {name}" for name in names}
    labels = [label for label in LABELS if label in needed]
    labels += [f"fp8 {name}" for name in collected(request, "name") & {*NOT_IN_FP8}]
    broken = {f"broken {name}": Case(root / f"groups {name}", alter="lost_and_exchanged") for name in names}
    cells = {label: checkpoint(cell, root) for label, cell in CELLS.items() if label in needed}
    return {label: Case(path) for label, path in write_all(root, labels)} | broken | cells


@pytest.mark.parametrize("label", daily(LABELS, DAILY))
def test_every_part_is_where_sglang_keeps_it(label, cases, runs):
    report = clean(runs[label])
    tensors = models.tensors(Path(cases[label].checkpoint))
    # SGLang never uses the shapes, and keeps only the last one of a fused layer.
    left = {name for name in tensors if name in report.draft or name.endswith(("inv_freq", "weight_shape"))}
    left |= {name for name, tensor in tensors.items() if not tensor.dim()}  # bounds in Gemma 4's audio tower
    assert report.equal == {name: tensor.nbytes for name, tensor in tensors.items() if name not in left}


@pytest.mark.parametrize("label", daily(CELLS, [*CELLS][1::3]))
def test_a_cell_of_the_matrix_is_clean(label, cases, runs):
    outcome = judged(CELLS[label], runs[label], values(cases[label]))
    assert (outcome.word, outcome.why) == (CLEAN, "")


@pytest.mark.parametrize("name", daily(BROKEN, ("qwen3_moe", "qwen3_vl_moe")))
def test_lost_and_exchanged_parts_are_named(name, cases, runs):
    report = reported(runs[f"broken {name}"])
    tensors = models.tensors(Path(cases[f"broken {name}"].checkpoint))
    missing = {one for one in tensors if LOST_PARTS.fullmatch(one)}
    assert {one.tensor for one in report.unwritten} == missing
    assert {one.tensor for one in report.dropped} == missing
    assert {one.tensor for one in report.differing} == {
        one for one in tensors if EXPERT.search(one) and not one.endswith("weight_shape")
    }


@pytest.mark.parametrize("name", daily(NOT_IN_FP8, ("llama", "mistral")))
def test_scales_that_a_class_drops_are_named(name, cases, runs):
    """SGLang's Llama class gives scales of blocks the name of scales of tensors, and then finds no parameter."""
    report = reported(runs[f"fp8 {name}"])
    tensors = models.tensors(Path(cases[f"fp8 {name}"].checkpoint))
    assert {one.tensor for one in report.dropped} == {one for one in tensors if one.endswith("_scale_inv")}
    assert "FP8" in why_no_scale(SGLANG, report.dropped[0].tensor, report)
    gate = "model.layers.3.mlp.gate"
    why = why_no_scale(SGLANG, f"{gate}.weight_scale_inv", reported(runs["fp8 qwen3_moe"]))
    assert why == text_with(f"{gate} BF16 SGLang")
