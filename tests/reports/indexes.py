"""Reports about indexes that are not those of the files beside them: stale ones, overlays, tensors that none lists."""

from __future__ import annotations

from pathlib import Path

import torch
from mutations.edits import edit_index, names, shard_of, tensor
from safetensors.torch import load_file, save_file
from torch import Tensor

from reports.files import on_checkpoint
from reports.report import Case

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


CASES = {
    "vllm#54230": Case("qwen3_moe/hf", (EXPERT, "each tensor in one shard"), on_checkpoint(_reused)),
    "colibri#1479": Case("qwen3_moe/hf", ("o_proj", "model-overlay.safetensors"), on_checkpoint(_overlay)),
    "mlx-vlm#1464": Case("qwen2-untied/hf", ("transformers reads model.safetensors",), on_checkpoint(_stray)),
    "mlx-vlm#1827": Case(
        "qwen2-untied/hf", ("the file that the index names", "14 more: missing"), on_checkpoint(_renumbered)
    ),
}
