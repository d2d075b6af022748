"""INT4 and FP8 blocks of every model type into real SGLang: clean, and broken ones named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import models
import pytest
from quantized import fp8_blocks, write
from sglang_families import CLEAN, EXPERT
from sglang_runs import LOST_PARTS, Case, run_cases

from ckptkit.app.api import int4_scheme, quantize
from verify.checks.witnesses.sglang import _why_unknown
from verify.witnesses.sglang.run import SglangRun

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

EXPERTS = r"re:.*\.mlp\.shared_expert\..*"  # 72 inputs in two test models, which no group of 32 divides
INT4 = {
    name: {"group_size": 32, "ignore": (EXPERTS,) if name.startswith(("qwen3_next", "qwen3_5_moe")) else ()}
    for name in CLEAN
    if not name.startswith("gpt_oss")  # no reader knows its experts one by one
}
CHANNEL = ("qwen2-untied", "qwen3_moe", "deepseek_v3", "glm4_moe")
ZERO_POINTS = ("qwen2-tied", "qwen3_moe", "deepseek_v3", "minimax_m2")
FP8 = ("qwen2-tied", "qwen3_moe", "glm4_moe", "deepseek_v3", "glm4_moe_lite", "minimax_m2", "glm4", "gemma3_text")
NOT_IN_FP8 = ("llama", "mistral")
LINEAR = re.compile(r".*layers\.\d+\..*(_proj|_proj_with_mqa|\.w[123])\.weight")
BROKEN = ("qwen2-tied", "qwen3_moe", "glm4_moe", "deepseek_v3", "minimax_m2", "qwen3_vl_moe")


def in_fp8(plain: Path, target: Path) -> Path:
    block = [16, 16]
    known = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
    write(
        plain,
        target,
        lambda name: LINEAR.fullmatch(name) is not None,
        fp8_blocks(16, 16),
        lambda config: config | {"quantization_config": known},
    )
    return target


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    root = tmp_path_factory.mktemp("formats")
    for name in {*INT4, *FP8, *NOT_IN_FP8}:
        models.save(name, root / name)
    found: dict[str, Case] = {}

    def int4(label: str, name: str, **options: object) -> None:
        readers = ("sglang",) if options.get("symmetric") is False else None
        scheme = int4_scheme(**options)  # type: ignore[arg-type]
        quantize(root / name, root / f"{label} {name}", scheme, **({"readers": readers} if readers else {}))
        found[f"{label} {name}"] = Case(root / f"{label} {name}")

    for name, options in INT4.items():
        int4("groups", name, **options)
    for name in CHANNEL:
        int4("rows", name, group_size="channel", grid="minmax")
    for name in ZERO_POINTS:
        int4("zero points", name, group_size=32, grid="minmax", symmetric=False)
    for name in (*FP8, *NOT_IN_FP8):
        found[f"fp8 {name}"] = Case(in_fp8(root / name, root / f"fp8 {name}"))
    broken = {f"broken {name}": Case(root / f"groups {name}", alter="lost_and_exchanged") for name in BROKEN}
    return found | broken


@pytest.fixture(scope="module")
def runs(cases: Mapping[str, Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, SglangRun]:
    return run_cases(cases, tmp_path_factory.mktemp("runs"))


SOUND = [
    *(f"groups {name}" for name in INT4),
    *(f"rows {name}" for name in CHANNEL),
    *(f"zero points {name}" for name in ZERO_POINTS),
    *(f"fp8 {name}" for name in FP8),
]


@pytest.mark.parametrize("label", SOUND)
def test_every_part_is_where_sglang_keeps_it(
    label: str, cases: Mapping[str, Case], runs: Mapping[str, SglangRun]
) -> None:
    report = runs[label].report
    assert report is not None, runs[label]
    assert (report.unwritten, report.dropped, report.differing, report.routers, report.computed) == ((), (), (), (), ())
    tensors = models.tensors(Path(cases[label].checkpoint))
    # SGLang never uses the shapes, and keeps only the last one of a fused layer.
    left = {name for name in tensors if name in report.draft or name.endswith(("inv_freq", "weight_shape"))}
    assert report.equal == {name: tensor.nbytes for name, tensor in tensors.items() if name not in left}


@pytest.mark.parametrize("name", BROKEN)
def test_lost_and_exchanged_parts_are_named(
    name: str, cases: Mapping[str, Case], runs: Mapping[str, SglangRun]
) -> None:
    """A norm and the packed weight of one expert's up are missing; two experts of another layer are exchanged."""
    report = runs[f"broken {name}"].report
    assert report is not None, runs[f"broken {name}"]
    tensors = models.tensors(Path(cases[f"broken {name}"].checkpoint))
    missing = {one for one in tensors if LOST_PARTS.fullmatch(one)}
    assert {one.tensor for one in report.unwritten} == missing
    assert {one.tensor for one in report.dropped} == missing
    assert {one.tensor for one in report.differing} == {
        one for one in tensors if EXPERT.search(one) and not one.endswith("weight_shape")
    }


@pytest.mark.parametrize("name", NOT_IN_FP8)
def test_scales_that_a_class_drops_are_named(
    name: str, cases: Mapping[str, Case], runs: Mapping[str, SglangRun]
) -> None:
    """SGLang's Llama class gives scales of blocks the name of scales of tensors, and then finds no parameter."""
    report = runs[f"fp8 {name}"].report
    assert report is not None, runs[f"fp8 {name}"]
    tensors = models.tensors(Path(cases[f"fp8 {name}"].checkpoint))
    assert {one.tensor for one in report.dropped} == {one for one in tensors if one.endswith("_scale_inv")}
    assert "cannot serve the model in this format" in _why_unknown(report.dropped[0], report.model, {})
