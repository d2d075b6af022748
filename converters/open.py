"""Opens whatever checkpoint lies at a path."""

from __future__ import annotations

from pathlib import Path

from ckptkit.converters.megatron.legacy import LegacyCheckpoint
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.formats.deltas import open_deltas
from ckptkit.formats.detect import Location, locate
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.storage.directory import Directory


def open_checkpoint(path: str | Path | Directory, hf: str | Path | Directory | None = None) -> Checkpoint:
    """An HF or Megatron checkpoint, or the newest version that deltas lead to.

    `hf` gives the config for a Megatron checkpoint that does not carry its own; of deltas it is their base.
    """
    location = locate(path)
    if location.is_deltas:
        return open_deltas(location.path, hf)
    return HfCheckpoint(location.directory) if location.is_hf else open_megatron(location, hf)


def open_megatron(
    location: Location, hf: str | Path | Directory | None = None
) -> TorchDistCheckpoint | LegacyCheckpoint:
    """A Megatron checkpoint in either format."""
    return LegacyCheckpoint(location.path, hf=hf) if location.legacy else TorchDistCheckpoint(location.path, hf=hf)
