"""llm-compressor: its INT4 checkpoints through `lint`, `verify` and `convert`, and the bytes of its floats."""

import re

import pytest
from safetensors.torch import load_file, save_file
from support import models
from support.engine_models import saved

import ckptkit
from ckptkit.quant.schemes.floats import FloatScheme
from interop.beside import start_jobs
from interop.releases import release

MODEL_FREE, EXPOSED = "model_free_ptq", "model_free_ptq, nothing ignored but lm_head"
RTN, ASYMMETRIC, GPTQ, ORDERED = "RTN", "RTN, asymmetric", "GPTQ", "GPTQ, by importance of columns"
# The model that is quantized in each way.
RUNS = {
    MODEL_FREE: "qwen3_moe",
    EXPOSED: "qwen3_moe",
    RTN: "qwen2-untied",
    ASYMMETRIC: "qwen2-untied",
    ORDERED: "qwen2-untied",
    GPTQ: "qwen3_moe",
}
# What ckptkit calls a scheme of compressed-tensors, and models whose sides all blocks divide.
FLOATS = {"FP8_BLOCK": "fp8-block", "FP8_DYNAMIC": "fp8-channel", "MXFP4A16": "mxfp4", "NVFP4A16": "nvfp4"}
WHOLE = ("dense", "moe")
# Without slime, which reads `ignore` in its own way; what it would pack is then a warning.
READERS = ("sglang", "vllm", "transformers")
# transformers 5 holds experts fused, and takes none of them packed.
MOE_READERS = ("sglang", "vllm")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The releases by name, and by the number of the run `out`, `unpacked` and what ckptkit makes of it."""
    root = tmp_path_factory.mktemp("llm_compressor")
    for name in set(RUNS.values()):
        release(name, root / name)
    jobs = [
        {"how": how, "hf": str(root / name), "out": str(of(root, how, "out")), "unpacked": str(of(root, how, "plain"))}
        for how, name in RUNS.items()
    ]
    for name in WHOLE:
        one_file(saved(name, root))
        jobs += [{"how": how, "hf": str(root / name), "out": str(root / f"{name}-{how}")} for how in FLOATS]
    start_jobs("llm_compressor_worker", root, jobs)
    return root


def one_file(path):
    """Puts a model into one file: `model_free_ptq` of NVFP4 stops at a shard with the second half of a pair alone."""
    tensors = models.tensors(path)
    for file in (*path.glob("*.safetensors"), path / "model.safetensors.index.json"):
        file.unlink()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def of(root, how, part):
    return root / f"{list(RUNS).index(how)}-{part}"


@pytest.mark.parametrize("how", RUNS)
def test_ckptkit_unpacks_what_compressed_tensors_does_bit_for_bit(root, how):
    ckptkit.convert(of(root, how, "out"), of(root, how, "megatron"))
    ckptkit.convert(of(root, how, "megatron"), of(root, how, "back"))
    theirs = load_file(of(root, how, "plain"))
    assert theirs.keys() == models.tensors(root / RUNS[how]).keys()
    assert models.unequal(of(root, how, "back"), theirs) == []


@pytest.mark.parametrize("how", [how for how in RUNS if how != EXPOSED])
def test_verify_passes_for_the_readers_of_the_format(root, how):
    readers = MOE_READERS if RUNS[how] == "qwen3_moe" else READERS
    report = ckptkit.verify(of(root, how, "out"), root / RUNS[how], readers=readers)
    assert errors(report.findings) == []
    assert report.status == "passed"
    compared = next(check.tensors_compared for check in report.checks if check.code == "CK305")
    # Attention has four matrices, an MLP or an expert three, in 12 layers.
    assert compared == 12 * (4 + 3 * 12 if RUNS[how] == "qwen3_moe" else 4 + 3)


@pytest.mark.parametrize("how", RUNS)
def test_lint_names_the_tensors_that_must_not_be_packed(root, how):
    report = ckptkit.lint(of(root, how, "out"), readers=READERS)
    packed = {tensor for finding in report.findings if finding.kind == "packed" for tensor in finding.tensors}
    assert packed == (
        {"model.embed_tokens.weight_packed", "model.layers.{0..11}.mlp.gate.weight_packed"} if how == EXPOSED else set()
    )


def test_without_a_model_the_router_and_embeddings_are_packed_unless_ignored(root):
    found = ckptkit.verify(of(root, EXPOSED, "out"), root / RUNS[EXPOSED], readers=MOE_READERS).findings
    assert [(finding.code, finding.tensor, finding.count) for finding in errors(found)] == [
        ("CK301", "model.embed_tokens.weight_packed", 1),
        ("CK301", "model.layers.{0..11}.mlp.gate.weight_packed", 12),
    ]


def test_transformers_cannot_load_the_packed_experts(root):
    found = ckptkit.verify(of(root, GPTQ, "out"), readers=("transformers",)).findings
    assert {finding.code for finding in errors(found)} == {"CK302"}
    assert all(".experts." in str(finding.tensor) for finding in errors(found))


def test_slime_would_pack_the_router_that_the_documented_pattern_spares(root):
    # `re:.*mlp.gate$` is matched with module names by the format's readers, with names of tensors by slime.
    found = ckptkit.verify(of(root, MODEL_FREE, "out"), root / RUNS[MODEL_FREE], readers=("slime",)).findings
    assert [finding.code for finding in errors(found)] == ["CK302"]
    assert "model.layers.{0..11}.mlp.gate.weight" in errors(found)[0].actual


@pytest.mark.parametrize("how", FLOATS)
@pytest.mark.parametrize("name", WHOLE)
def test_floats_are_what_ckptkit_quantizes(root, name, how):
    ours, theirs = root / f"{name}-{how}-ckptkit", root / f"{name}-{how}"
    ckptkit.quantize(root / name, ours, FloatScheme(FLOATS[how], "compressed-tensors"), readers=("vllm",))
    scales = [tensor for tensor in models.tensors(theirs) if tensor.endswith("weight_scale")]
    assert len(scales) == 6 * (4 + 3 * (16 if name == "moe" else 1))
    # SGLang 0.5.16 does not read MXFP4 in this layout, nor experts in NVFP4 of weights alone.
    report = ckptkit.verify(theirs, root / name, readers=("vllm",) if "FP4" in how else ("sglang", "vllm"))
    if (name, how) == ("moe", "NVFP4A16"):
        # It pairs gate and up of an MLP, and not those of experts, of which kernels take one scale.
        assert all(re.search(r"\.experts\.\d+\.(gate|up)_proj\.weight_", one) for one in models.unequal(ours, theirs))
        assert {one.code for one in errors(report.findings)} == {"CK306"}
        return
    assert models.unequal(ours, theirs) == []
    assert (report.status, report.findings) == ("passed", [])
    formula = next(check for check in report.checks if check.code == "CK305")
    assert formula.tensors_compared == len(scales)


def errors(found):
    return [finding for finding in found if finding.severity == "error"]
