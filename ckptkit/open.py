"""Opens whatever checkpoint lies at a path."""

from __future__ import annotations

from pathlib import Path

from ckptkit.checkpoint import Checkpoint
from ckptkit.formats import locate
from ckptkit.safetensors_io import HfCheckpoint


def open_checkpoint(path: str | Path, hf: str | Path | None = None) -> Checkpoint:
    """An HF or Megatron checkpoint. `hf` gives the config for a Megatron one that does not carry its own."""
    location = locate(path)
    if location.kind == "hf":
        return HfCheckpoint(location.path)
    from ckptkit.torch_dist_reader import TorchDistCheckpoint

    return TorchDistCheckpoint(location.path, hf=hf)
