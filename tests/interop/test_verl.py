"""verl's model merger, which makes an HF directory of what verl saves while it trains with Megatron or FSDP."""

import shutil
from itertools import product

import pytest
from support import models

import ckptkit
from interop.beside import start, start_jobs
from interop.releases import release

MODELS, BACKENDS = ("qwen2-untied", "qwen3_moe"), ("megatron", "fsdp")
SIZES = {"qwen2-untied": 147, "qwen3_moe": 543}


def merge(backend, actor, merged):
    words = ("merge", "--backend", backend, "--local_dir", str(actor), "--target_dir", str(merged))
    return start("verl_worker", *words)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """By model `NAME`, ckptkit's `NAME-megatron`, and by backend what verl saved (`NAME-BACKEND-actor`) and merged.

    With Megatron verl's own model loads ckptkit's torch_dist first; with FSDP it is saved by two ranks.
    """
    root = tmp_path_factory.mktemp("verl")
    jobs = []
    for name in MODELS:
        release(name, root / name)
        ckptkit.convert(root / name, root / f"{name}-megatron")
        paths = {"hf": str(root / name), "megatron": str(root / f"{name}-megatron")}
        jobs += [{"backend": backend, "actor": str(root / f"{name}-{backend}-actor"), **paths} for backend in BACKENDS]
    start_jobs("verl_worker", root, jobs)
    for name, backend in product(MODELS, BACKENDS):
        merge(backend, root / f"{name}-{backend}-actor", root / f"{name}-{backend}-merged")
    return root


@pytest.mark.parametrize(("name", "backend"), list(product(MODELS, BACKENDS)))
def test_what_verl_merges_is_the_release_bit_for_bit(root, name, backend):
    merged = root / f"{name}-{backend}-merged"
    assert models.unequal(root / name, merged) == []
    report = ckptkit.verify(merged, root / name)
    assert report.status == "passed"
    # transformers writes the files beside the weights anew: its tokenizer has another id for the end of a text, and
    # its config of Qwen3-MoE no longer names the number of experts as the release does.
    assert {finding.code for finding in report.findings} <= {"CK702", "CK707"}
    assert next(check for check in report.checks if check.code == "CK202").tensors_compared == SIZES[name]


@pytest.mark.parametrize("name", MODELS)
def test_what_verl_saves_comes_back_from_ckptkit_bit_for_bit(root, name):
    saved = root / f"{name}-megatron-actor" / "model" / "dist_ckpt"
    ckptkit.convert(saved, root / f"{name}-back", hf=root / name)
    assert models.unequal(root / name, root / f"{name}-back") == []


def test_the_merger_refuses_one_key_a_layer(root, tmp_path):
    model = tmp_path / "actor" / "model"
    shutil.copytree(root / "qwen3_moe-megatron" / "release", model / "dist_ckpt")
    (model / "huggingface").mkdir()
    for file in ("config.json", "tokenizer_config.json"):
        shutil.copy(root / "qwen3_moe" / file, model / "huggingface")
    with pytest.raises(
        pytest.fail.Exception, match=r"KeyError: .decoder\.layers\.[a-z_.]+ from model not in state dict"
    ):
        merge("megatron", tmp_path / "actor", tmp_path / "merged")
