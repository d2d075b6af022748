"""Keeps tensors that no Megatron language model holds (a vision tower) beside its weights, untouched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.plan import Plan, View, identity
from ckptkit.formats.hf.reader import has_weights
from ckptkit.storage.directory import Directory, directory
from converters.registry import family_of

FOLDER = "carried"  # holds the passthrough tensors of a converted checkpoint


def passthrough_names(source: Checkpoint) -> list[str]:
    """Names of these tensors, by what the family says."""
    family = family_of(source.config)
    return [name for name in source.specs if family.carries(name)]


def passthrough_of(source: Checkpoint, where: str) -> View | None:
    """These tensors as a checkpoint of their own; None when there are none."""
    names = passthrough_names(source)
    plan = Plan(tuple(identity(source.specs[name]) for name in names), names, where=where, config=source.config)
    return View(source, plan) if names else None


def passthrough_beside(
    source: Checkpoint, hf: Path | Directory, root: Path, opened: Callable[[Directory], Checkpoint]
) -> View | None:
    """Passthrough tensors of a Megatron checkpoint, from `hf` if that has weights, else from `carried/` in `root`.

    `opened` opens the HF directory, which may be quantized.
    """
    family = family_of(source.config)
    if not family.carried and not family.carried_ends:
        return None
    folder = next((found for found in (directory(hf), Directory(root / FOLDER)) if has_weights(found.path)), None)
    return passthrough_of(opened(folder), str(folder)) if folder else None
