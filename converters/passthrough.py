"""Tensors of an HF checkpoint that no Megatron language model holds (a vision tower): they stay beside its weights, untouched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.plan import Plan, View, identity
from ckptkit.formats.hf.reader import HfCheckpoint, has_weights
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from converters.registry import family_of

if TYPE_CHECKING:
    from converters.megatron.legacy import LegacyCheckpoint

FOLDER = "carried"


def carried_names(source: Checkpoint) -> list[str]:
    """Names of these tensors, by what the family says."""
    family = family_of(source.config)
    return [name for name in source.specs if family.carries(name)]


def carried(source: Checkpoint, where: str) -> View | None:
    """These tensors as a checkpoint of their own; None when there are none."""
    names = carried_names(source)
    plan = Plan(tuple(identity(source.specs[name]) for name in names), names, where=where, config=source.config)
    return View(source, plan) if names else None


def carried_beside(
    source: TorchDistCheckpoint | LegacyCheckpoint, root: Path, opened: Callable[[Path], Checkpoint] = HfCheckpoint
) -> View | None:
    """Those that belong to a Megatron checkpoint: of its HF directory where that has weights, else of `carried/` in `root`.

    `opened` opens the HF directory, which may be quantized.
    """
    family = family_of(source.config)
    if not family.carried and not family.carried_ends:
        return None
    for path in (source.hf_path, root / FOLDER):
        if has_weights(path):
            return carried(opened(path), str(path))
    return None
