"""verl's model merger, which makes an HF directory of the checkpoints that verl saves with Megatron.

verl saves the model as megatron-core does by default, all layers of a key in one tensor. Its merger asks for the same
and does not read what the checkpoint says of its own layout (`content_metadata`), as Megatron-LM does.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from families import CASES
from families.case import save

import ckptkit
from interop.beside import start


def test_the_merger_refuses_one_key_a_layer(tmp_path: Path) -> None:
    save("qwen3_moe", CASES["qwen3_moe"], tmp_path / "hf", torch.bfloat16)
    ckptkit.convert(tmp_path / "hf", tmp_path / "megatron")
    model = tmp_path / "actor" / "model"
    shutil.copytree(tmp_path / "megatron" / "release", model / "dist_ckpt")
    (model / "huggingface").mkdir()
    for file in ("config.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "hf" / file, model / "huggingface")
    arguments = ("merge", "--backend", "megatron", "--local_dir", str(tmp_path / "actor"))
    with pytest.raises(
        pytest.fail.Exception, match=r"KeyError: .decoder\.layers\.[a-z_.]+ from model not in state dict"
    ):
        start("verl_worker", *arguments, "--target_dir", str(tmp_path / "merged"))
