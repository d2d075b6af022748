"""Writes Megatron's torch_dist format from one process: no megatron, no process group, only tensors in flight in memory.

Format: torch.distributed.checkpoint (DCP) blobs in `.distcp` files, a pickled DCP `Metadata` as `.metadata`, Megatron's
`common.pt` and `metadata.json` (megatron-core `dist_checkpointing/strategies/torch.py`, `serialization.py`).
"""

from __future__ import annotations

import io
import json
import os
import pickle
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

from ckptkit.blob import STORAGE_OF_DTYPE
from ckptkit.errors import CkptkitError
from ckptkit.formats import TRACKER
from ckptkit.raw import write_at
from ckptkit.saved_tensor import SavedLayout
from ckptkit.specs import TensorSpec, summarize
from ckptkit.torch_dist_names import disk_key, extra_states, norm_alias, rows_apart

_FILE_LIMIT = 10_000_000_000

# One key a layer, experts on one axis: what Megatron's `sharded_state_dict` is told to ask for when it loads.
CONTENT_METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": False}
BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}


@dataclass(frozen=True)
class _Part:
    """Rows of a tensor that Megatron stores under one key, and the bytes that are theirs."""

    key: str
    expert: int | None
    rows: int | None
    saved: SavedLayout
    file: int
    offset: int


class TorchDistWriter:
    """Writes `root/release/` and, last of all, the tracker file of `root`. `args` become the stored training arguments.

    Where each tensor lies follows from `specs` alone, so that several threads may write, and what they write is always the same.
    Raises CkptkitError for a dtype that the format has no name for, and for experts of one layer in several dtypes.
    """

    def __init__(self, root: Path, specs: Mapping[str, TensorSpec], args: Mapping[str, Any]) -> None:
        self._root = root
        self._path = root / "release"
        self._path.mkdir()
        self._specs = specs
        self._args = args
        self._experts: dict[str, int] = defaultdict(int)
        self._left = set(specs)
        self._chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        self._dtypes: dict[str, torch.dtype] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        self._end = [0]
        self._parts = {name: self._place(spec) for name, spec in specs.items()}
        self._files = [os.open(self._path / _file(index), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644) for index in range(len(self._end))]

    def _place(self, spec: TensorSpec) -> list[_Part]:
        if spec.dtype not in STORAGE_OF_DTYPE:
            raise CkptkitError(f"{spec} has a dtype that no Megatron checkpoint holds", "give --dtype, or start from a release in bfloat16")
        key, expert = disk_key(spec.name)
        if expert is not None:
            self._experts[key] = max(self._experts[key], expert + 1)
        if self._dtypes.setdefault(key, spec.dtype) != spec.dtype:
            raise CkptkitError(f"{spec}: the other experts of this layer are {self._dtypes[key]}", "give --dtype or cast the source first")
        apart = rows_apart(key, self._args)
        return [self._place_part(spec, part, expert, rows) for part, rows in (apart.items() if apart else [(key, None)])]

    def _place_part(self, spec: TensorSpec, key: str, expert: int | None, rows: int | None) -> _Part:
        shape = spec.shape if rows is None else (rows, *spec.shape[1:])
        sizes = torch.Size(shape if expert is None else (1, *shape))
        offsets = torch.Size([0] * len(shape) if expert is None else [expert] + [0] * len(shape))
        saved = SavedLayout.of(sizes, spec.dtype)
        if self._end[-1] > _FILE_LIMIT:
            self._end.append(0)
        part = _Part(key, expert, rows, saved, len(self._end) - 1, self._end[-1])
        self._end[-1] += saved.size
        self._dtypes[key] = spec.dtype
        self._storage[MetadataIndex(key, offsets, len(self._chunks[key]))] = _StorageInfo(_file(part.file), part.offset, saved.size)
        self._chunks[key].append(ChunkStorageMetadata(offsets, sizes))
        return part

    def write(self, name: str, tensor: Tensor) -> None:
        spec = self._specs[name]
        if name not in self._left or tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise CkptkitError(f"{spec} cannot be written as {list(tensor.shape)} {tensor.dtype}, or is written twice")
        self._left.remove(name)
        parts = self._parts[name]
        apart = [part.rows for part in parts if part.rows is not None]
        for part, rows in zip(parts, torch.split(tensor, apart) if apart else [tensor], strict=True):
            part.saved.write(self._files[part.file], part.offset, rows)

    def finish(self) -> None:
        if self._left:
            raise CkptkitError(f"{self._path}: {len(self._left)} tensor(s) were never written: {summarize(sorted(self._left))}")
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {key: self._tensor_entry(key) for key in self._chunks}
        for key in list(entries):
            if alias := norm_alias(key, entries.keys()):
                entries[alias] = entries[key]
                self._storage[MetadataIndex(alias, torch.Size([0]), 0)] = self._storage[MetadataIndex(key, torch.Size([0]), 0)]
        nothing = self._append_nothing()
        for key in extra_states(self._specs, max(self._experts.values(), default=1)):
            entries[key] = BytesStorageMetadata()
            self._storage[MetadataIndex(key)] = nothing
        self._close()
        metadata = Metadata(entries, planner_data=None, storage_data=self._storage, storage_meta=StorageMeta())
        with (self._path / ".metadata").open("wb") as file:
            pickle.dump(metadata, file)
        common = {"args": Namespace(**self._args), "checkpoint_version": 3.0, "iteration": 0, "content_metadata": dict(CONTENT_METADATA)}
        (self._path / "common.pt").write_bytes(_saved(common))
        (self._path / "metadata.json").write_text(json.dumps(BACKEND))
        (self._root / TRACKER).write_text("release")

    def _append_nothing(self) -> _StorageInfo:
        """The object that stands for every `_extra_state`."""
        content = _saved([None])
        write_at(self._files[-1], content, self._end[-1])
        return _StorageInfo(_file(len(self._files) - 1), self._end[-1], len(content))

    def _tensor_entry(self, key: str) -> TensorStorageMetadata:
        chunks = self._chunks[key]
        inner = chunks[0].sizes
        size = torch.Size([self._experts[key], *inner[1:]]) if key in self._experts else inner
        return TensorStorageMetadata(TensorProperties(dtype=self._dtypes[key]), size, chunks)

    def discard(self) -> None:
        self._close()

    def _close(self) -> None:
        for descriptor in self._files:
            os.close(descriptor)
        self._files = []


def _file(index: int) -> str:
    return f"__0_{index}.distcp"


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
