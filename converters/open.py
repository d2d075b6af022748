"""Opens a checkpoint of any format."""

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
    """Opens an HF or Megatron checkpoint, or the newest version of deltas.

    `hf`: the HF directory for a Megatron checkpoint without a config, or the base of deltas.
    """
    location = locate(path)
    if location.kind == "deltas":
        return open_deltas(location.path, hf)
    return HfCheckpoint(location.directory) if location.kind == "hf" else open_megatron(location, hf)


def open_megatron(
    location: Location, hf: str | Path | Directory | None = None
) -> TorchDistCheckpoint | LegacyCheckpoint:
    """A Megatron checkpoint in either format."""
    return LegacyCheckpoint(location.path, hf=hf) if location.legacy else TorchDistCheckpoint(location.path, hf=hf)
