"""miles' own exporters and quantizers, where they differ from slime's, on ckptkit's checkpoints; `MILES` a checkout."""

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
from interop.scripts import Outcome, Script, run_scripts
from interop.slime_runs import export, megatron, quantize, release
from quant.kernels.floats import quantize_fp8
from quant.schemes.floats import FloatScheme
from quant.schemes.w4a16 import int4_scheme

WHOLE = ("qwen2-tied", "llama", "qwen3_moe", "glm4_moe", "qwen3_next")
LOST = ["model.layers.12.embed_tokens.weight", "model.layers.12.shared_head.head.weight"]


def ray_export(label: str, source: Path, checkpoint: Path, output: Path) -> Script:
    """torch_dist to HF by the tool that works on Ray."""
    words = ["--input-dir", checkpoint / "release", "--output-dir", output, "--origin-hf-dir", source]
    words += ["--model-name", source.name.partition("-")[0].replace("_", "")]
    return Script(label, "tools/convert_torch_dist_to_hf_ray.py", [*map(str, words), "--concurrency", "1"])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where everything is: `NAME`, `NAME-megatron`, and what miles made of them."""
    return tmp_path_factory.mktemp("miles")


@pytest.fixture(scope="module")
def runs(root: Path, checkout: Callable[[str], Path]) -> dict[str, Outcome]:
    """Every script, by label."""
    miles = checkout("MILES")
    names = (*WHOLE, "glm4_moe-mtp", "deepseek_v3")
    scripts = [
        export(f"{name}/export", release(root, name), megatron(root, name), root / f"{name}-export") for name in names
    ]
    source = release(root, "deepseek_v3")
    scripts.append(export("slime/export", source, megatron(root, "deepseek_v3", "slime"), root / "slime-export"))
    scripts += [
        ray_export(f"{name}/ray", root / name, megatron(root, name), root / f"{name}-ray")
        for name in ("qwen2-tied", "qwen3_moe")
    ]
    scripts.append(
        ray_export("slime/ray", root / "qwen3_moe", megatron(root, "qwen3_moe", "slime"), root / "slime-ray")
    )
    source = release(root, "qwen3_moe")
    scripts.append(quantize("int4", "convert_hf_to_int4_direct.py", source, root / "int4"))
    scripts.append(
        quantize(
            "not symmetric", "convert_hf_to_int4_direct.py", source, root / "not-symmetric", "--is-symmetric", "False"
        )
    )
    block = ("--strategy", "block", "--block-size", "128", "128")
    scripts.append(quantize("fp8", "convert_hf_to_fp8.py", source, root / "fp8", *block))
    whole = saved("moe", root)
    scripts.append(quantize("fp8 blocks", "convert_hf_to_fp8.py", whole, root / "fp8-blocks", *block))
    scripts.append(quantize("fp8 rows", "convert_hf_to_fp8.py", whole, root / "fp8-rows", "--strategy", "channel"))
    scripts.append(quantize("mxfp8", "convert_hf_to_mxfp8.py", whole, root / "mxfp8"))
    return run_scripts("miles", miles, scripts, root / "runs")


@pytest.mark.parametrize("name", WHOLE)
def test_export_gives_the_source_bit_for_bit(name: str, runs: dict[str, Outcome], root: Path) -> None:
    assert runs[f"{name}/export"].code == 0, runs[f"{name}/export"].log[-3000:]
    assert changed(root / f"{name}-export", root / name) == []


def test_export_on_ray_gives_the_source_bit_for_bit(runs: dict[str, Outcome], root: Path) -> None:
    assert runs["qwen2-tied/ray"].code == 0, runs["qwen2-tied/ray"].log[-3000:]
    assert changed(root / "qwen2-tied-ray", root / "qwen2-tied") == []


def test_export_on_ray_refuses_two_names_of_one_norm_and_takes_slimes_dialect(
    runs: dict[str, Outcome], root: Path
) -> None:
    assert runs["qwen3_moe/ray"].code == 1
    assert "Duplicate HF tensor emitted" in runs["qwen3_moe/ray"].log
    assert runs["slime/ray"].code == 0, runs["slime/ray"].log[-3000:]
    assert changed(root / "slime-ray", root / "qwen3_moe") == []


def test_export_leaves_out_the_copies_in_the_mtp_layer(runs: dict[str, Outcome], root: Path) -> None:
    assert changed(root / "glm4_moe-mtp-export", root / "glm4_moe-mtp") == LOST
    report = ckptkit.verify(root / "glm4_moe-mtp-export", source=root / "glm4_moe-mtp")
    assert "CK202" in {finding.code for finding in report.findings}


def test_export_refuses_the_local_specs_names_of_latent_attention_which_slimes_dialect_lacks(
    runs: dict[str, Outcome], root: Path
) -> None:
    assert runs["deepseek_v3/export"].code == 1
    assert "Unknown parameter name: module.module.decoder.layers.0.self_attention.kv_layernorm.weight" in (
        runs["deepseek_v3/export"].log
    )
    assert runs["slime/export"].code == 0, runs["slime/export"].log[-3000:]
    assert changed(root / "slime-export", root / "deepseek_v3") == LOST


def test_int4_is_what_ckptkit_quantizes(runs: dict[str, Outcome], root: Path) -> None:
    assert runs["int4"].code == 0, runs["int4"].log[-3000:]
    scheme = int4_scheme(reference=root / "int4")
    ckptkit.quantize(root / "qwen3_moe", root / "int4-ckptkit", scheme, like=root / "int4")
    shapes = [name for name in models.tensors(root / "int4") if name.endswith("weight_shape")]
    assert len(shapes) == 12 * 12 * 3
    assert changed(root / "int4-ckptkit", root / "int4", shapes) == []


def test_asking_for_zero_points_gives_none(runs: dict[str, Outcome], root: Path) -> None:
    assert runs["not symmetric"].code == 0, runs["not symmetric"].log[-3000:]
    assert changed(root / "not-symmetric", root / "int4") == []


@pytest.mark.parametrize(("label", "scheme"), [("fp8 blocks", "fp8-block"), ("fp8 rows", "fp8-channel")])
def test_fp8_is_what_ckptkit_quantizes(label: str, scheme: str, runs: dict[str, Outcome], root: Path) -> None:
    assert runs[label].code == 0, runs[label].log[-3000:]
    ckptkit.quantize(root / "moe", root / f"{scheme}-ckptkit", FloatScheme(scheme, "slime"))
    assert changed(root / f"{scheme}-ckptkit", root / label.replace(" ", "-")) == []


def test_mxfp8_is_what_ckptkit_quantizes(runs: dict[str, Outcome], root: Path) -> None:
    assert runs["mxfp8"].code == 0, runs["mxfp8"].log[-3000:]
    ckptkit.quantize(root / "moe", root / "mxfp8-ckptkit", FloatScheme("mxfp8"))
    assert changed(root / "mxfp8-ckptkit", root / "mxfp8") == []
    report = ckptkit.verify(root / "mxfp8", source=root / "moe")
    assert report.findings == []
    assert report.status == "passed"


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
    found = ckptkit.verify(root / "fp8", source=root / "qwen3_moe").findings
    assert {finding.code for finding in found} == {"CK106"}


def test_fp8_converts_to_megatron_and_back(runs: dict[str, Outcome], root: Path) -> None:
    assert runs["fp8"].code == 0, runs["fp8"].log[-3000:]
    convert(root / "fp8", root / "fp8-megatron")
    convert(root / "fp8-megatron", root / "fp8-back", hf=root / "qwen3_moe")
    assert models.tensors(root / "fp8-back").keys() == models.tensors(root / "qwen3_moe").keys()
