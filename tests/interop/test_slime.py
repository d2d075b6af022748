"""slime's own converters on ckptkit's checkpoints, and ckptkit on theirs.

`SLIME` names a checkout; `MEGATRON_LM` the Megatron-LM that slime pins, with its patch, for slime's way to torch_dist.
"""

import pytest
import torch
from support import models

import ckptkit
from ckptkit.app.api import convert
from interop.scripts import run_scripts
from interop.slime_runs import Exports, codes, load, quantize, release, shared

WHOLE = ("qwen2-tied", "llama", "qwen3_moe", "qwen2_moe", "glm4_moe", "minimax_m2")
EXPORTED = (*WHOLE, "glm4_moe-mtp", "qwen3_next", "deepseek_v3")
EXACT = ("qwen2-tied", "llama", "qwen3_moe", "qwen2_moe")
LOADED = (*EXACT, "glm4_moe-mtp", "deepseek_v3")
BIAS = "mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("slime")


@pytest.fixture(scope="module")
def runs(root, checkout):
    slime = checkout("SLIME")
    source = release(root, "qwen3_moe")
    scripts = shared(root, EXPORTED)
    scripts.append(quantize("int4", "convert_hf_to_int4_direct.py", source, root / "int4", "--is-symmetric"))
    scripts.append(quantize("zero points", "convert_hf_to_int4_direct.py", source, root / "zero-points"))
    return run_scripts("slime", slime, scripts, root / "runs")


@pytest.fixture(scope="module")
def loads(root, checkout):
    """slime's way to torch_dist: NAME-load, and NAME-back, which is what ckptkit converts that to."""
    slime = checkout("SLIME")
    scripts = [load(f"{name}/load", release(root, name), root / f"{name}-load") for name in LOADED]
    found = run_scripts("slime", slime, scripts, root / "loads", checkout("MEGATRON_LM"))
    for name in LOADED:
        assert found[f"{name}/load"].code == 0, found[f"{name}/load"].log[-3000:]
        convert(root / f"{name}-load", root / f"{name}-back", hf=root / name)
    return found


@pytest.mark.parametrize("name", WHOLE)
def test_export_gives_the_source_bit_for_bit(name, runs, root):
    assert runs[f"{name}/export"].code == 0, runs[f"{name}/export"].log[-3000:]
    assert models.unequal(root / f"{name}-export", root / name) == []


def test_export_swaps_the_halves_of_qwen3_nexts_mtp_projection(runs, root):
    assert models.unequal(root / "qwen3_next-export", root / "qwen3_next") == ["mtp.fc.weight"]
    found, wanted = (models.tensors(root / path)["mtp.fc.weight"] for path in ("qwen3_next-export", "qwen3_next"))
    assert torch.equal(torch.cat(found.chunk(2, 1)[::-1], 1), wanted)
    assert "CK202" in codes(root / "qwen3_next-export", root / "qwen3_next")


@pytest.mark.parametrize("name", EXACT)
def test_what_slime_loads_and_saves_converts_back_bit_for_bit(name, loads, root):
    assert models.unequal(root / f"{name}-back", root / name) == []


@pytest.mark.parametrize("name", ["glm4_moe-mtp", "deepseek_v3"])
def test_slime_rounds_the_bias_of_routers_to_bfloat16(name, loads, root):
    found, wanted = models.tensors(root / f"{name}-back"), models.tensors(root / name)
    biases = [key for key in wanted if key.endswith(BIAS)]
    assert biases
    assert models.unequal(root / f"{name}-back", root / name, biases) == []
    for key in biases:
        assert not torch.equal(found[key], wanted[key])
        assert torch.equal(found[key], wanted[key].bfloat16().float())
    assert "CK202" in codes(root / f"{name}-load", root / name)


def test_int4_passes_but_for_the_total_size(runs, root):
    report = ckptkit.verify(root / "int4", source=root / "qwen3_moe")
    assert [(finding.code, finding.severity) for finding in report.findings] == [("CK106", "warning")]
    assert [issue for issue in ckptkit.lint(root / "int4").findings if issue.severity == "error"] == []


def test_int4_converts_to_megatron_and_back(runs, root):
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


def test_zero_points_that_slime_makes_by_default_are_found(runs, root):
    assert runs["zero points"].code == 0
    assert "CK309" in codes(root / "zero-points", root / "qwen3_moe")


class TestSlime(Exports):
    """What slime's tools share with miles'."""
