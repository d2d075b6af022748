"""Reads PEFT's adapters: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import os
from pathlib import Path

from ckptkit.core.errors import MissingError, UnsupportedError
from ckptkit.formats.detect import require_own_files
from ckptkit.formats.hf.reader import HfCheckpoint, read_json
from ckptkit.formats.hf.shard import read_shard
from ckptkit.storage.directory import directory

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"


def is_adapter(path: Path) -> bool:
    """Whether a directory has an adapter and no model."""
    has_adapter = (path / ADAPTER_CONFIG).exists() or (path / ADAPTER_WEIGHTS).exists()
    return has_adapter and not (path / "config.json").exists()


class AdapterFiles(HfCheckpoint):
    """A stored adapter; `config` is adapter_config.json. Reads headers. Raises CkptkitError for damage or pickles."""

    def __init__(self, root: Path) -> None:
        require_own_files(root)
        self.directory = directory(root)
        self.root = self.directory.path
        self.config = read_json(self.root / ADAPTER_CONFIG)
        if not os.path.lexists(self.root / ADAPTER_WEIGHTS):
            hint = "save the adapter with save_pretrained(..., safe_serialization=True)"
            if os.path.lexists(self.root / _PICKLE):
                raise UnsupportedError(f"{self.root / _PICKLE} is a pickle, which ckptkit does not read", hint)
            raise MissingError(f"{self.root} has no {ADAPTER_WEIGHTS}", hint)
        self.shards = {ADAPTER_WEIGHTS: read_shard(self.root / ADAPTER_WEIGHTS).sound()}
        self._shard_of = {name: shard for shard in self.shards.values() for name in shard.specs}
