"""verl's model merger, which makes an HF directory of the checkpoints that verl saves with Megatron.

verl saves the model as megatron-core does by default, all layers of a key in one tensor; its merger asks for the same
and does not read what the checkpoint says of its own layout (`content_metadata`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from families import CASES
from families.case import save
from megatron_saves import Save, save_with_megatron

import ckptkit
from ckptkit.formats.hf.reader import HfCheckpoint
from converters.megatron.parallel import ParallelSizes
from interop.beside import start
from interop.compare import differences

MODELS = ("qwen2-untied", "qwen3_moe")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By model: the release `hf`, ckptkit's `megatron`, and `actor`, the directory of one of verl's training steps."""
    root = tmp_path_factory.mktemp("verl")
    saves = []
    for name in MODELS:
        hf = root / name / "hf"
        save(name, CASES[name], hf, torch.bfloat16)
        ckptkit.convert(hf, root / name / "megatron")
        saves.append(
            Save(
                HfCheckpoint(hf).config,
                root / name / "megatron" / "release",
                root / name / "saved",
                sizes=ParallelSizes(),
                stacked=True,
            )
        )
    save_with_megatron(saves, world=1)
    for name in MODELS:
        actor(root / name / "actor", root / name / "saved" / "iter_0000010", root / name / "hf")
    return root


def actor(path: Path, torch_dist: Path, hf: Path) -> None:
    """A directory as verl lays it out, with this checkpoint."""
    shutil.copytree(torch_dist, path / "model" / "dist_ckpt")
    (path / "model" / "huggingface").mkdir()
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if (hf / file).exists():
            shutil.copy(hf / file, path / "model" / "huggingface")


def merge(path: Path, out: Path) -> str:
    """What the merger printed: it writes the HF directory `out`."""
    arguments = ("merge", "--backend", "megatron", "--local_dir", str(path), "--target_dir", str(out))
    return start("verl_worker", *arguments)


@pytest.mark.parametrize("name", MODELS)
def test_the_merger_and_ckptkit_make_the_same_of_what_megatron_saved(root: Path, name: str) -> None:
    merge(root / name / "actor", root / name / "merged")
    assert differences(root / name / "hf", root / name / "merged") == []
    ckptkit.convert(root / name / "actor" / "model" / "dist_ckpt", root / name / "back", hf=root / name / "hf")
    assert differences(root / name / "merged", root / name / "back") == []
    report = ckptkit.verify(root / name / "merged", root / name / "hf")
    assert {finding.code for finding in report.findings} <= {"CK720"}


def test_the_merger_refuses_one_key_a_layer(root: Path) -> None:
    actor(root / "apart", root / "qwen3_moe" / "megatron" / "release", root / "qwen3_moe" / "hf")
    with pytest.raises(pytest.fail.Exception, match=r"decoder\.layers\.self_attention\.linear_proj\.weight"):
        merge(root / "apart", root / "refused")
