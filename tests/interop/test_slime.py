"""slime's own converters on ckptkit's checkpoints, and ckptkit on theirs.

`SLIME` names a checkout; `MEGATRON_LM` the Megatron-LM that slime pins, with its patch, for slime's way to torch_dist.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import models
from support.engine_models import saved

import ckptkit
from ckptkit.app.api import convert
from interop.compare import changed
from interop.scripts import Outcome, run_scripts
from interop.slime_runs import export, load, megatron, quantize, release
from quant.kernels.floats import quantize_fp8
from quant.schemes.floats import FloatScheme
from quant.schemes.w4a16 import int4_scheme

WHOLE = ("qwen2-tied", "llama", "qwen3_moe", "qwen2_moe", "glm4_moe", "minimax_m2")
EXPORTED = (*WHOLE, "glm4_moe-mtp", "qwen3_next", "deepseek_v3")
EXACT = ("qwen2-tied", "llama", "qwen3_moe", "qwen2_moe")
LOADED = (*EXACT, "glm4_moe-mtp", "deepseek_v3")
LOST = ["model.layers.12.embed_tokens.weight", "model.layers.12.shared_head.head.weight"]
BIAS = "mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where everything is: `NAME`, `NAME-megatron`, and what slime made of them."""
    return tmp_path_factory.mktemp("slime")


@pytest.fixture(scope="module")
def runs(root: Path, checkout: Callable[[str], Path]) -> dict[str, Outcome]:
    """Every script that needs nothing but slime, by label."""
    slime = checkout("SLIME")
    scripts = [
        export(f"{name}/export", release(root, name), megatron(root, name), root / f"{name}-export")
        for name in EXPORTED
    ]
    source = release(root, "deepseek_v3")
    scripts.append(export("slime/export", source, megatron(root, "deepseek_v3", "slime"), root / "slime-export"))
    source = release(root, "qwen3_moe")
    scripts.append(quantize("int4", "convert_hf_to_int4_direct.py", source, root / "int4", "--is-symmetric"))
    scripts.append(quantize("zero points", "convert_hf_to_int4_direct.py", source, root / "zero-points"))
    block = ("--strategy", "block", "--block-size", "128", "128")
    scripts.append(quantize("fp8", "convert_hf_to_fp8.py", source, root / "fp8", *block))
    whole = saved("moe", root)
    scripts.append(quantize("fp8 blocks", "convert_hf_to_fp8.py", whole, root / "fp8-blocks", *block))
    scripts.append(quantize("fp8 rows", "convert_hf_to_fp8.py", whole, root / "fp8-rows", "--strategy", "channel"))
    return run_scripts("slime", slime, scripts, root / "runs")


@pytest.fixture(scope="module")
def loads(root: Path, checkout: Callable[[str], Path]) -> dict[str, Outcome]:
    """slime's way to torch_dist: NAME-load, and NAME-back, which is what ckptkit converts that to."""
    slime = checkout("SLIME")
    scripts = [load(f"{name}/load", release(root, name), root / f"{name}-load") for name in LOADED]
    found = run_scripts("slime", slime, scripts, root / "loads", checkout("MEGATRON_LM"))
    for name in LOADED:
        assert found[f"{name}/load"].code == 0, found[f"{name}/load"].log[-3000:]
        convert(root / f"{name}-load", root / f"{name}-back", hf=root / name)
    return found


def codes(path: Path, source: Path) -> set[str]:
    """The checks that find something."""
    return {finding.code for finding in ckptkit.verify(path, source=source).findings}


@pytest.mark.parametrize("name", WHOLE)
def test_export_gives_the_source_bit_for_bit(name: str, runs: dict[str, Outcome], root: Path) -> None:
    assert runs[f"{name}/export"].code == 0, runs[f"{name}/export"].log[-3000:]
    assert changed(root / f"{name}-export", root / name) == []


def test_export_leaves_out_the_copies_in_the_mtp_layer(runs: dict[str, Outcome], root: Path) -> None:
    assert runs["glm4_moe-mtp/export"].code == 0
    assert changed(root / "glm4_moe-mtp-export", root / "glm4_moe-mtp") == LOST
    assert "CK202" in codes(root / "glm4_moe-mtp-export", root / "glm4_moe-mtp")


def test_export_swaps_the_halves_of_qwen3_nexts_mtp_projection(runs: dict[str, Outcome], root: Path) -> None:
    assert changed(root / "qwen3_next-export", root / "qwen3_next") == ["mtp.fc.weight"]
    found, wanted = (models.tensors(root / path)["mtp.fc.weight"] for path in ("qwen3_next-export", "qwen3_next"))
    assert torch.equal(torch.cat(found.chunk(2, 1)[::-1], 1), wanted)
    assert "CK202" in codes(root / "qwen3_next-export", root / "qwen3_next")


def test_export_refuses_names_of_the_local_spec_which_slimes_dialect_lacks(
    runs: dict[str, Outcome], root: Path
) -> None:
    assert runs["deepseek_v3/export"].code == 1
    refused = "self_attention.kv_layernorm.weight"
    assert f"Unknown parameter name: module.module.decoder.layers.0.{refused}" in runs["deepseek_v3/export"].log
    assert runs["slime/export"].code == 0, runs["slime/export"].log[-3000:]
    assert changed(root / "slime-export", root / "deepseek_v3") == LOST


@pytest.mark.parametrize("name", EXACT)
def test_what_slime_loads_and_saves_converts_back_bit_for_bit(name: str, loads: dict[str, Outcome], root: Path) -> None:
    assert changed(root / f"{name}-back", root / name) == []


@pytest.mark.parametrize("name", ["glm4_moe-mtp", "deepseek_v3"])
def test_slime_rounds_the_bias_of_routers_to_bfloat16(name: str, loads: dict[str, Outcome], root: Path) -> None:
    found, wanted = models.tensors(root / f"{name}-back"), models.tensors(root / name)
    biases = [key for key in wanted if key.endswith(BIAS)]
    assert biases
    assert changed(root / f"{name}-back", root / name, biases) == []
    for key in biases:
        assert not torch.equal(found[key], wanted[key])
        assert torch.equal(found[key], wanted[key].bfloat16().float())
    assert "CK202" in codes(root / f"{name}-load", root / name)


def test_int4_is_what_ckptkit_quantizes(runs: dict[str, Outcome], root: Path) -> None:
    assert runs["int4"].code == 0, runs["int4"].log[-3000:]
    ckptkit.quantize(
        root / "qwen3_moe", root / "int4-ckptkit", int4_scheme(reference=root / "int4"), like=root / "int4"
    )
    shapes = [name for name in models.tensors(root / "int4") if name.endswith("weight_shape")]
    assert len(shapes) == 12 * 12 * 3
    assert changed(root / "int4-ckptkit", root / "int4", shapes) == []


def test_int4_passes_but_for_the_total_size(runs: dict[str, Outcome], root: Path) -> None:
    report = ckptkit.verify(root / "int4", source=root / "qwen3_moe")
    assert [(finding.code, finding.severity) for finding in report.findings] == [("CK106", "warning")]
    assert [issue for issue in ckptkit.lint(root / "int4").findings if issue.severity == "error"] == []


def test_int4_converts_to_megatron_and_back(runs: dict[str, Outcome], root: Path) -> None:
    convert(root / "int4", root / "int4-megatron")
    convert(root / "int4-megatron", root / "int4-back", hf=root / "qwen3_moe")
    found, wanted = models.tensors(root / "int4-back"), models.tensors(root / "qwen3_moe")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        packed = ".experts." in name
        assert packed or torch.equal(found[name], tensor)
        if packed:  # half a step of 1/7 of the largest in its group, and what bfloat16 rounds of scale and product
            step = tensor.float().unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 7
            error = (found[name].float() - tensor.float()).unflatten(-1, (-1, 32)).abs()
            assert bool((error <= 0.55 * step).all())


def test_zero_points_that_slime_makes_by_default_are_found(runs: dict[str, Outcome], root: Path) -> None:
    assert runs["zero points"].code == 0
    assert "CK309" in codes(root / "zero-points", root / "qwen3_moe")


@pytest.mark.parametrize(("label", "scheme"), [("fp8 blocks", "fp8-block"), ("fp8 rows", "fp8-channel")])
def test_fp8_is_what_ckptkit_quantizes(label: str, scheme: str, runs: dict[str, Outcome], root: Path) -> None:
    assert runs[label].code == 0, runs[label].log[-3000:]
    ckptkit.quantize(root / "moe", root / f"{scheme}-ckptkit", FloatScheme(scheme, "slime"))
    assert changed(root / f"{scheme}-ckptkit", root / label.replace(" ", "-")) == []


def test_fp8_blocks_at_the_edges_are_what_ckptkit_rounds(runs: dict[str, Outcome], root: Path) -> None:
    """No side of these matrices but the hidden size divides by 128."""
    assert runs["fp8"].code == 0, runs["fp8"].log[-3000:]
    found, source = models.tensors(root / "fp8"), models.tensors(root / "qwen3_moe")
    quantized = [name for name, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(quantized) == 12 * (4 + 12 * 3)
    for name in quantized:
        codes, scales = quantize_fp8(source[name], (128, 128), "slime", name)
        assert torch.equal(found[f"{name}_scale_inv"], scales), name
        assert torch.equal(found[name].view(torch.uint8), codes.view(torch.uint8)), name


def test_fp8_against_its_source_passes_but_for_the_total_size(runs: dict[str, Outcome], root: Path) -> None:
    assert runs["fp8"].code == 0, runs["fp8"].log[-3000:]
    assert codes(root / "fp8", root / "qwen3_moe") == {"CK106"}


def test_fp8_converts_to_megatron(runs: dict[str, Outcome], root: Path) -> None:
    assert runs["fp8"].code == 0, runs["fp8"].log[-3000:]
    convert(root / "fp8", root / "fp8-megatron")
    convert(root / "fp8-megatron", root / "fp8-back", hf=root / "qwen3_moe")
    found, wanted = models.tensors(root / "fp8-back"), models.tensors(root / "qwen3_moe")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        # e4m3 has 3 bits behind the leading one: 1/16 of the value, or half a step of the smallest values.
        error = (found[name].float() - tensor.float()).abs()
        assert bool((error <= tensor.float().abs() / 15 + tensor.float().abs().max() / 448 / 512).all()), name
