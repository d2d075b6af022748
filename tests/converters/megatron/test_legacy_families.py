"""Megatron's legacy format for architectures of every kind: what ranks saved becomes the release again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import CASES
from families.case import save
from support import models
from support.installed import require_megatron
from support.megatron_saves import Save, save_with_megatron
from support.nightly import collected, daily

from ckptkit.app.api import convert
from converters.megatron.parallel import ParallelSizes
from converters.planner import rules_of

require_megatron()

# What is special about each: multi-token prediction behind a pipeline, with the embedding on both stages; latent
# attention, sparse attention; linear attention in parts, with an output gate; biases and sinks; norms over all heads,
# of 1 + weight, after layers.
HOW = {
    "glm4_moe-mtp": ParallelSizes(pp=2, layout="Et*7|t*5mL"),
    "mimo": ParallelSizes(pp=2),
    "deepseek_v3": ParallelSizes(tp=2, etp=2),
    "glm_moe_dsa": ParallelSizes(tp=2, ep=2),
    "qwen3_next": ParallelSizes(tp=2, ep=2),
    "gpt_oss": ParallelSizes(tp=2, ep=2),
    "minimax_m2": ParallelSizes(tp=2, ep=2),
    "gemma3_text": ParallelSizes(tp=2),
    "glm4": ParallelSizes(tp=2),
}


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`NAME/release`, `NAME/megatron` and what real Megatron saved of it in `NAME/saved`."""
    root = tmp_path_factory.mktemp("legacy")
    saves = []
    for name, sizes in ((name, HOW[name]) for name in sorted(collected(request, "name"))):
        (root / name).mkdir()
        save(name, CASES[name], root / name / "release", torch.bfloat16)
        convert(root / name / "release", root / name / "megatron")
        config = json.loads((root / name / "release" / "config.json").read_text())
        saves.append(Save(config, root / name / "megatron" / "release", root / name / "saved", sizes, legacy=True))
    save_with_megatron(saves, world=2)
    return root


@pytest.mark.parametrize("name", daily(HOW, ("glm4_moe-mtp", "deepseek_v3", "qwen3_next", "gpt_oss")))
def test_legacy_save_comes_back_as_the_release(root: Path, tmp_path: Path, name: str) -> None:
    release = root / name / "release"
    assert len(list((root / name / "saved").rglob("model_optim_rng.pt"))) == 2
    convert(root / name / "saved", tmp_path / "back", hf=release)
    before, after = models.tensors(release), models.tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    # Megatron holds these in bfloat16 less one, and has rounded them.
    rounded = {
        hf
        for rule in rules_of(json.loads((release / "config.json").read_text()))
        if rule.mapping.upcast
        for hf in rule.hf
    }
    for hf, tensor in before.items():
        assert after[hf].dtype == tensor.dtype, hf
        assert (
            torch.allclose(after[hf], tensor, rtol=0, atol=1 / 128) if hf in rounded else torch.equal(after[hf], tensor)
        ), hf
