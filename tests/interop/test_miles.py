"""miles' own exporters and quantizers, where they differ from slime's, on ckptkit's checkpoints; `MILES` a checkout."""

import pytest
from support import models

import ckptkit
from ckptkit.quant.schemes.floats import FloatScheme
from interop.scripts import Script, run_scripts
from interop.slime_runs import Exports, megatron, quantize, release, shared

WHOLE = ("qwen2-tied", "llama", "qwen3_moe", "glm4_moe", "qwen3_next")


def ray_export(label, source, checkpoint, output):
    words = ["--input-dir", checkpoint / "release", "--output-dir", output, "--origin-hf-dir", source]
    words += ["--model-name", source.name.partition("-")[0].replace("_", "")]
    return Script(label, "tools/convert_torch_dist_to_hf_ray.py", [*map(str, words), "--concurrency", "1"])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("miles")


@pytest.fixture(scope="module")
def runs(root, checkout):
    miles = checkout("MILES")
    source = release(root, "qwen3_moe")
    scripts = shared(root, (*WHOLE, "glm4_moe-mtp", "deepseek_v3"))
    scripts += [
        ray_export(f"{name}/ray", root / name, megatron(root, name), root / f"{name}-ray")
        for name in ("qwen2-tied", "qwen3_moe")
    ]
    scripts.append(ray_export("slime/ray", source, megatron(root, "qwen3_moe", "slime"), root / "slime-ray"))
    scripts.append(quantize("int4", "convert_hf_to_int4_direct.py", source, root / "int4"))
    words = ("--is-symmetric", "False")
    scripts.append(quantize("not symmetric", "convert_hf_to_int4_direct.py", source, root / "not-symmetric", *words))
    scripts.append(quantize("mxfp8", "convert_hf_to_mxfp8.py", root / "moe", root / "mxfp8"))
    return run_scripts("miles", miles, scripts, root / "runs")


@pytest.mark.parametrize("name", WHOLE)
def test_export_gives_the_source_bit_for_bit(name, runs, root):
    assert runs[f"{name}/export"].code == 0, runs[f"{name}/export"].log[-3000:]
    assert models.unequal(root / f"{name}-export", root / name) == []


def test_export_on_ray_gives_the_source_bit_for_bit(runs, root):
    assert runs["qwen2-tied/ray"].code == 0, runs["qwen2-tied/ray"].log[-3000:]
    assert models.unequal(root / "qwen2-tied-ray", root / "qwen2-tied") == []


def test_export_on_ray_refuses_two_names_of_one_norm_and_takes_slimes_dialect(runs, root):
    assert runs["qwen3_moe/ray"].code == 1
    assert "Duplicate HF tensor emitted" in runs["qwen3_moe/ray"].log
    assert runs["slime/ray"].code == 0, runs["slime/ray"].log[-3000:]
    assert models.unequal(root / "slime-ray", root / "qwen3_moe") == []


def test_asking_for_zero_points_gives_none(runs, root):
    assert runs["not symmetric"].code == 0, runs["not symmetric"].log[-3000:]
    assert models.unequal(root / "not-symmetric", root / "int4") == []


def test_mxfp8_is_what_ckptkit_quantizes(runs, root):
    assert runs["mxfp8"].code == 0, runs["mxfp8"].log[-3000:]
    ckptkit.quantize(root / "moe", root / "mxfp8-ckptkit", FloatScheme("mxfp8"))
    assert models.unequal(root / "mxfp8-ckptkit", root / "mxfp8") == []
    report = ckptkit.verify(root / "mxfp8", source=root / "moe")
    assert report.findings == []
    assert report.status == "passed"


class TestMiles(Exports):
    """What miles' tools share with slime's."""
