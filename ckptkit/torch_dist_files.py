"""The files of a Megatron torch_dist checkpoint to write: no megatron, no process group.

Format: torch.distributed.checkpoint (DCP) blobs in `.distcp` files, a pickled DCP `Metadata` as `.metadata`, Megatron's
`common.pt` and `metadata.json` (megatron-core `dist_checkpointing/strategies/torch.py`, `serialization.py`).
"""

from __future__ import annotations

import functools
import io
import json
import pickle
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping
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

from ckptkit.blob import STORAGE_OF_DTYPE, Blob
from ckptkit.errors import CkptkitError
from ckptkit.files import FILE_BYTES, Piece
from ckptkit.formats import TRACKER
from ckptkit.raw import WrittenFile
from ckptkit.saved_tensor import SavedLayout
from ckptkit.specs import TensorSpec
from ckptkit.torch_dist_names import disk_key, extra_states, norm_alias, rows_apart

_FOLDER = "release"

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
    sizes: torch.Size
    offset: int


class TorchDistFiles:
    """`release/` below the checkpoint's root and, last of all, the tracker file. `args` become the stored training arguments.

    Tensors lie in the order of `specs`, in files of at least `file_bytes` each but the last, so that one file is a piece of work.
    Raises CkptkitError for a dtype that the format has no name for, and for experts of one layer in several dtypes.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], args: Mapping[str, Any], file_bytes: int = FILE_BYTES) -> None:
        self.specs = specs
        self.names: dict[str, list[str]] = {}
        self._args = args
        self._experts: dict[str, int] = defaultdict(int)
        self._chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        self._dtypes: dict[str, torch.dtype] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        self._end: dict[str, int] = {}
        # Thousands of experts have one shape.
        self._saved = functools.cache(SavedLayout.of)
        self._parts = {name: self._place(spec, file_bytes) for name, spec in specs.items()}
        self._nothing = _StorageInfo(Path(self._last).name, self._end[self._last], len(_NOTHING))
        self._end[self._last] += len(_NOTHING)

    @property
    def _last(self) -> str:
        return next(reversed(self._end))

    def _place(self, spec: TensorSpec, file_bytes: int) -> list[_Part]:
        if spec.dtype not in STORAGE_OF_DTYPE:
            raise CkptkitError(f"{spec} has a dtype that no Megatron checkpoint holds", "give --dtype, or start from a release in bfloat16")
        key, expert = disk_key(spec.name)
        if expert is not None:
            self._experts[key] = max(self._experts[key], expert + 1)
        if self._dtypes.setdefault(key, spec.dtype) != spec.dtype:
            raise CkptkitError(f"{spec}: the other experts of this layer are {self._dtypes[key]}", "give --dtype or cast the source first")
        if not self._end or self._end[self._last] >= file_bytes:
            self._end[f"{_FOLDER}/__0_{len(self._end)}.distcp"] = 0
        self.names.setdefault(self._last, []).append(spec.name)
        apart = rows_apart(key, self._args)
        return [self._place_part(spec, part, expert, rows) for part, rows in (apart.items() if apart else [(key, None)])]

    def _place_part(self, spec: TensorSpec, key: str, expert: int | None, rows: int | None) -> _Part:
        shape = spec.shape if rows is None else (rows, *spec.shape[1:])
        sizes = torch.Size(shape if expert is None else (1, *shape))
        offsets = torch.Size([0] * len(shape) if expert is None else [expert] + [0] * len(shape))
        saved, file = self._saved(sizes, spec.dtype), self._last
        part = _Part(key, expert, rows, saved, sizes, self._end[file])
        self._end[file] += saved.size
        self._dtypes[key] = spec.dtype
        self._storage[MetadataIndex(key, offsets, len(self._chunks[key]))] = _StorageInfo(file.rpartition("/")[2], part.offset, saved.size)
        self._chunks[key].append(ChunkStorageMetadata(offsets, sizes))
        return part

    def size(self, file: str) -> int:
        """Bytes of a file."""
        return self._end[file]

    def around(self, file: str) -> tuple[int, bytes]:
        """At the end of the last file, the object that stands for every `_extra_state`."""
        return self._nothing.offset, _NOTHING if file == self._last else b""

    def put(self, name: str, file: WrittenFile, piece: Piece) -> None:
        """Writes a tensor, or its parts that have keys of their own: rows, one part after the other."""
        start = 0
        for part in self._parts[name]:
            part.saved.write(file, part.offset, functools.partial(_shifted, piece, start))
            start += part.saved.data.size

    def read(self, file: str, root: Path) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of a file. Raises CkptkitError as `Blob.tensor` does."""
        for name in self.names[file]:
            spec = self.specs[name]
            blobs = [(part, Blob(root / file, part.offset, part.saved.size)) for part in self._parts[name]]
            yield name, torch.cat([blob.tensor(spec.dtype, tuple(part.sizes)).flatten() for part, blob in blobs]).reshape(spec.shape)

    def finish(self, root: Path) -> None:
        """Writes the metadata, the arguments and the tracker."""
        path = root / _FOLDER
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {key: self._tensor_entry(key) for key in self._chunks}
        storage = dict(self._storage)
        for key in list(entries):
            if alias := norm_alias(key, entries.keys()):
                entries[alias] = entries[key]
                storage[MetadataIndex(alias, torch.Size([0]), 0)] = storage[MetadataIndex(key, torch.Size([0]), 0)]
        for key in extra_states(self.specs, max(self._experts.values(), default=1)):
            entries[key] = BytesStorageMetadata()
            storage[MetadataIndex(key)] = self._nothing
        metadata = Metadata(entries, planner_data=None, storage_data=storage, storage_meta=StorageMeta())
        with (path / ".metadata").open("wb") as stream:
            pickle.dump(metadata, stream)
        common = {"args": Namespace(**self._args), "checkpoint_version": 3.0, "iteration": 0, "content_metadata": dict(CONTENT_METADATA)}
        (path / "common.pt").write_bytes(_saved(common))
        (path / "metadata.json").write_text(json.dumps(BACKEND))
        (root / TRACKER).write_text(_FOLDER)

    def _tensor_entry(self, key: str) -> TensorStorageMetadata:
        chunks = self._chunks[key]
        inner = chunks[0].sizes
        size = torch.Size([self._experts[key], *inner[1:]]) if key in self._experts else inner
        return TensorStorageMetadata(TensorProperties(dtype=self._dtypes[key]), size, chunks)


def _shifted(piece: Piece, start: int, begin: int, end: int) -> memoryview:
    return piece(start + begin, start + end)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


_NOTHING = _saved([None])
