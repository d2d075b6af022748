"""Reports about indexes that are not those of the files beside them: stale ones, overlays, tensors that none lists."""

from __future__ import annotations

from pathlib import Path

import torch
from mutations.edits import edit_index, names, shard_of, tensor
from safetensors.torch import load_file, save_file
from torch import Tensor

from reports.files import VERIFY, on_checkpoint
from reports.report import Report

EXPERT = "model.layers.5.mlp.experts.7.up_proj.weight"


def _add(file: Path, more: dict[str, Tensor]) -> None:
    """Tensors in a file that the index does not place there."""
    save_file(load_file(file) | more, file, metadata={"format": "pt"})


def _reused(path: Path) -> None:
    """A file of another save of the model is used for some tensors, and holds others under names that are elsewhere."""
    own = shard_of(path, EXPERT)
    other = next(file for file in sorted(path.glob("*.safetensors")) if file != own)
    _add(other, {EXPERT: torch.randn_like(tensor(path, EXPERT).float()).mul(0.02).bfloat16()})


def _overlay(path: Path) -> None:
    """New values of some tensors in a file of their own, which the index names; the old ones are still stored."""
    changed = names(path, ".self_attn.o_proj.weight")
    save_file({name: tensor(path, name) * 1.5 for name in changed}, path / "model-overlay.safetensors")
    edit_index(path, lambda weight_map: weight_map.update(dict.fromkeys(changed, "model-overlay.safetensors")))


def _stray(path: Path) -> None:
    """One file of a 4-bit conversion beside the shards of the model in BF16."""
    codes = {
        name: torch.ones(tensor(path, name).shape[0], 24, dtype=torch.uint32) for name in names(path, "_proj.weight")
    }
    save_file(codes, path / "model.safetensors", metadata={"format": "mlx"})


def _renumbered(path: Path) -> None:
    """The files were written anew under other numbers; the index is the old one."""
    files = sorted(path.glob("*.safetensors"))
    for number, file in enumerate(files, 1):
        file.rename(path / f"model-{number:05d}-of-{len(files) + 2:05d}.safetensors")


REPORTS = (
    Report(
        "vllm#54230",
        "2026-08",
        "A file of another save is used for 129 of its tensors, and holds 1,024 more that the index does not place "
        "there, some under names that are elsewhere: vLLM loads every tensor of a file that the index names.",
        VERIFY,
        "qwen3_moe/hf",
        "CK104",
        (EXPERT, "each tensor in one shard"),
        on_checkpoint(_reused),
    ),
    Report(
        "colibri#1479",
        "2026-09",
        "An overlay: the index places tensors in a file of their own, and the files before still hold their old "
        "values.",
        VERIFY,
        "qwen3_moe/hf",
        "CK104",
        ("o_proj", "model-overlay.safetensors"),
        on_checkpoint(_overlay),
    ),
    Report(
        "mlx-vlm#1464",
        "2026-06",
        "A 4-bit model.safetensors was left beside the BF16 shards, and a reader takes every file.",
        VERIFY,
        "qwen2-untied/hf",
        "CK104",
        ("transformers reads model.safetensors",),
        on_checkpoint(_stray),
    ),
    Report(
        "mlx-vlm#1827",
        "2026-08",
        "Files were written anew under other names, and the index was not: what it names and is there is loaded.",
        VERIFY,
        "qwen2-untied/hf",
        "CK102",
        ("the file that the index names", "14 more: missing"),
        on_checkpoint(_renumbered),
    ),
)
