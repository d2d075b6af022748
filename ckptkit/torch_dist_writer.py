"""Writes Megatron's torch_dist format from one process: no megatron, no process group, only tensors in flight in memory.

Format: torch.distributed.checkpoint (DCP) blobs in `.distcp` files, a pickled DCP `Metadata` as `.metadata`, Megatron's
`common.pt` and `metadata.json` (megatron-core `dist_checkpointing/strategies/torch.py`, `serialization.py`).
"""

from __future__ import annotations

import json
import pickle
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptkit.errors import CkptkitError
from ckptkit.formats import TRACKER
from ckptkit.specs import TensorSpec, summarize
from ckptkit.torch_dist_names import disk_key, extra_states, norm_alias, rows_apart

_FILE_LIMIT = 10_000_000_000

# One key a layer, experts on one axis: what Megatron's `sharded_state_dict` is told to ask for when it loads.
CONTENT_METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": False}
BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}


class TorchDistWriter:
    """Writes `root/release/` and, last of all, the tracker file of `root`. `args` become the stored training arguments."""

    def __init__(self, root: Path, specs: Mapping[str, TensorSpec], args: Mapping[str, Any]) -> None:
        self._root = root
        self._path = root / "release"
        self._path.mkdir()
        self._specs = specs
        self._args = args
        self._experts: dict[str, int] = defaultdict(int)
        for name in specs:
            key, expert = disk_key(name)
            if expert is not None:
                self._experts[key] = max(self._experts[key], expert + 1)
        self._left = set(specs)
        self._chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        self._dtypes: dict[str, torch.dtype] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        self._files = 0
        self._file: BinaryIO = self._next_file()

    def _next_file(self) -> BinaryIO:
        file = (self._path / f"__0_{self._files}.distcp").open("xb")
        self._files += 1
        return file

    def _append(self, value: Any) -> _StorageInfo:
        if self._file.tell() > _FILE_LIMIT:
            self._file.close()
            self._file = self._next_file()
        start = self._file.tell()
        _save(value, self._file)
        return _StorageInfo(Path(self._file.name).name, start, self._file.tell() - start)

    def write(self, name: str, tensor: Tensor) -> None:
        spec = self._specs[name]
        if name not in self._left or tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise CkptkitError(f"{spec} cannot be written as {list(tensor.shape)} {tensor.dtype}, or is written twice")
        self._left.remove(name)
        key, expert = disk_key(name)
        if self._dtypes.setdefault(key, spec.dtype) != spec.dtype:
            raise CkptkitError(f"{spec}: the other experts of this layer are {self._dtypes[key]}", "give --dtype or cast the source first")
        parts = rows_apart(key, self._args)
        for part, rows in zip(parts, torch.split(tensor, list(parts.values())), strict=True) if parts else [(key, tensor)]:
            self._dtypes[part] = spec.dtype
            self._write(part, expert, rows)

    def _write(self, key: str, expert: int | None, tensor: Tensor) -> None:
        whole = tensor if expert is None else tensor.unsqueeze(0)
        offsets = torch.Size([0] * whole.dim() if expert is None else [expert] + [0] * tensor.dim())
        # A view would be saved with all of its storage.
        whole = whole.clone() if whole.untyped_storage().nbytes() != whole.nbytes else whole
        self._record(key, offsets, whole.shape, self._append(whole.contiguous()))

    def _record(self, key: str, offsets: torch.Size, sizes: torch.Size, info: _StorageInfo) -> None:
        self._storage[MetadataIndex(key, offsets, len(self._chunks[key]))] = info
        self._chunks[key].append(ChunkStorageMetadata(offsets, sizes))

    def finish(self) -> None:
        if self._left:
            raise CkptkitError(f"{self._path}: {len(self._left)} tensor(s) were never written: {summarize(sorted(self._left))}")
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {key: self._tensor_entry(key) for key in self._chunks}
        for key in list(entries):
            if alias := norm_alias(key, entries.keys()):
                entries[alias] = entries[key]
                self._storage[MetadataIndex(alias, torch.Size([0]), 0)] = self._storage[MetadataIndex(key, torch.Size([0]), 0)]
        nothing = self._append([None])
        for key in extra_states(self._specs, max(self._experts.values(), default=1)):
            entries[key] = BytesStorageMetadata()
            self._storage[MetadataIndex(key)] = nothing
        self._file.close()
        metadata = Metadata(entries, planner_data=None, storage_data=self._storage, storage_meta=StorageMeta())
        with (self._path / ".metadata").open("wb") as file:
            pickle.dump(metadata, file)
        common = {"args": Namespace(**self._args), "checkpoint_version": 3.0, "iteration": 0, "content_metadata": dict(CONTENT_METADATA)}
        with (self._path / "common.pt").open("wb") as file:
            _save(common, file)
        (self._path / "metadata.json").write_text(json.dumps(BACKEND))
        (self._root / TRACKER).write_text("release")

    def _tensor_entry(self, key: str) -> TensorStorageMetadata:
        chunks = self._chunks[key]
        inner = chunks[0].sizes
        size = torch.Size([self._experts[key], *inner[1:]]) if key in self._experts else inner
        return TensorStorageMetadata(TensorProperties(dtype=self._dtypes[key]), size, chunks)

    def discard(self) -> None:
        self._file.close()


def _save(value: Any, file: BinaryIO) -> None:
    try:
        torch.save(value, file)
    except RuntimeError as error:
        # torch closes its zip on the way out, and that fails too: a full disk or ctrl-C is the context, not the error.
        if error.__context__ is not None:
            raise error.__context__ from None
        raise
