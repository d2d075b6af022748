"""Writes the files of a Megatron torch_dist checkpoint, without megatron and process groups.

Format: torch.distributed.checkpoint (DCP) blobs in `.distcp` files, a pickled DCP `Metadata` as `.metadata`, Megatron's
`common.pt` and `metadata.json` (megatron-core `dist_checkpointing/strategies/torch.py`, `serialization.py`).
"""

from __future__ import annotations

import functools
import importlib
import io
import itertools
import json
import math
import pickle
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptkit.core.dtypes import ITEMSIZE, STORAGE_CLASS, torch_dtype
from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.detect import TRACKER
from ckptkit.formats.files import FILE_BYTES, Piece
from ckptkit.formats.torch_dist.names import disk_key, extra_states, second_names, split_row_counts
from ckptkit.formats.torch_save.blob import Blob
from ckptkit.formats.torch_save.saved_tensor import SavedLayout, SavedTensor
from ckptkit.storage.buffers import BUFFER, new_buffer, row_cuts
from ckptkit.storage.write import WrittenFile

if TYPE_CHECKING:
    from torch import Tensor

_FOLDER = "release"

# One key per layer, experts on one axis: options of Megatron's `sharded_state_dict` for loading.
CONTENT_METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": False}
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, slots=True)
class Cuts:
    """The chunks of a tensor: `axis` is 0 or 1, `starts` are the chunks' first indices, the first one is 0."""

    axis: int
    starts: tuple[int, ...]


_UNCUT = Cuts(0, (0,))


@dataclass(frozen=True, slots=True)
class _Part:
    """A chunk: `box` in the tensor, `offsets` and `sizes` in its key's tensor, and `begin` of its blob in the file."""

    key: str
    box: tuple[slice, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    saved: SavedLayout
    begin: int


class TorchDistFiles:
    """The files of `release/` in the checkpoint's root, and last the tracker file.

    `args`: the stored training arguments. Tensors are in the order of `specs`, in files of at least `file_bytes` except
    the last. `cuts` splits tensors into chunks, so that a rank can read a part. `second_names`: norms also have their
    name in Megatron's local spec. Raises CkptkitError for an unsupported dtype, and for experts of one layer in several
    dtypes.
    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        args: Mapping[str, Any],
        file_bytes: int = FILE_BYTES,
        cuts: Mapping[str, Cuts] | None = None,
        second_names: bool = True,
    ) -> None:
        self.specs, self._second_names = specs, second_names
        self.names: dict[str, list[str]] = {}
        self._args, self._cuts = args, cuts or {}
        self._experts: dict[str, int] = defaultdict(int)
        self._dtypes: dict[str, str] = {}
        self._end: dict[str, int] = {}
        # Thousands of experts have the same shape.
        self._saved = functools.cache(SavedLayout.of)
        self._parts = {name: self._place(spec, file_bytes) for name, spec in specs.items()}
        self._empty_state = self._end[self._last]
        self._end[self._last] += len(_no_state())

    @property
    def _last(self) -> str:
        return next(reversed(self._end))

    def _place(self, spec: TensorSpec, file_bytes: int) -> list[_Part]:
        if spec.dtype not in STORAGE_CLASS:
            message = f"{spec} has a dtype that Megatron checkpoints do not support"
            raise CkptkitError(message, "pass --dtype, or start from a release in bfloat16")
        key, expert = disk_key(spec.name)
        if expert is not None:
            self._experts[key] = max(self._experts[key], expert + 1)
        if self._dtypes.setdefault(key, spec.dtype) != spec.dtype:
            message = f"{spec} differs in dtype from the other experts of its layer ({self._dtypes[key]})"
            raise CkptkitError(message, "pass --dtype, or cast the source first")
        if not self._end or self._end[self._last] >= file_bytes:
            self._end[f"{_FOLDER}/__0_{len(self._end)}.distcp"] = 0
        self.names.setdefault(self._last, []).append(spec.name)
        row_counts = split_row_counts(key, self._args) or {key: spec.shape[0] if spec.shape else 1}
        cuts, first, parts = self._cuts.get(spec.name, _UNCUT), 0, []
        for part, rows in row_counts.items():
            boxes = _boxes(spec.shape, cuts, first, first + rows)
            parts += [self._place_part(spec, part, expert, first, box) for box in boxes]
            first += rows
        return parts

    def _place_part(self, spec: TensorSpec, key: str, expert: int | None, first: int, box: tuple[slice, ...]) -> _Part:
        """Appends a chunk to the current file; `first` is the tensor's row that is the key's first one."""
        offsets = tuple([one.start - (0 if axis else first) for axis, one in enumerate(box)])
        sizes = tuple([one.stop - one.start for one in box])
        if expert is not None:
            offsets, sizes = (expert, *offsets), (1, *sizes)
        saved, file = self._saved(sizes, spec.dtype), self._last
        part = _Part(key, box, offsets, sizes, saved, self._end[file])
        self._dtypes[key] = spec.dtype
        self._end[file] += saved.size
        return part

    def size(self, file: str) -> int:
        return self._end[file]

    def extra_bytes(self, file: str) -> tuple[int, bytes]:
        """The object for every `_extra_state`, at the end of the last file."""
        return self._empty_state, _no_state() if file == self._last else b""

    def put(self, name: str, file: WrittenFile, piece: Piece) -> None:
        """Writes a tensor, chunk by chunk, or row by row if the chunks are columns."""
        spec, parts = self.specs[name], self._parts[name]
        if self._cuts.get(name, _UNCUT).axis:
            _put_columns(spec, parts, file, piece)
            return
        row = math.prod(spec.shape[1:]) * ITEMSIZE[spec.dtype]
        for part in parts:
            start = part.box[0].start * row if part.box else 0

            def shifted(begin: int, end: int, start: int = start) -> memoryview:
                return piece(start + begin, start + end)

            part.saved.write(file, part.begin, shifted)

    def read(self, file: str, root: Path) -> Iterator[tuple[str, Tensor]]:
        import torch

        for name in self.names[file]:
            spec = self.specs[name]
            blobs = [(Blob(root / file, part.begin, part.saved.size), part.sizes) for part in self._parts[name]]
            chunks = [blob.tensor(spec.dtype, sizes) for blob, sizes in blobs]
            if len(chunks) == 1:
                yield name, chunks[0].reshape(spec.shape)
                continue
            tensor = torch.empty(spec.shape, dtype=spec.torch_dtype)
            for part, chunk in zip(self._parts[name], chunks, strict=True):
                tensor[part.box] = chunk
            yield name, tensor

    def prepare(self) -> None:
        """Imports torch's classes for metadata, which takes half a second."""
        importlib.import_module("torch.distributed.checkpoint")

    def finish(self, root: Path) -> None:
        """Writes the metadata, the arguments and the tracker."""
        path = root / _FOLDER
        with (path / ".metadata").open("wb") as stream:
            pickle.dump(self._metadata(), stream)
        common = {"args": Namespace(**self._args), "checkpoint_version": 3.0, "iteration": 0}
        (path / "common.pt").write_bytes(_saved({**common, "content_metadata": dict(CONTENT_METADATA)}))
        (path / "metadata.json").write_text(json.dumps(BACKEND))
        (root / TRACKER).write_text(_FOLDER)

    def _metadata(self) -> Any:
        # Plans do not need these imports (see `prepare`).
        import torch
        from torch.distributed.checkpoint import metadata as dcp
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        entries: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
        storage: dict[dcp.MetadataIndex, _StorageInfo] = {}
        chunks: dict[str, list[dcp.ChunkStorageMetadata]] = defaultdict(list)
        for file, names in self.names.items():
            for part in [part for name in names for part in self._parts[name]]:
                offsets = torch.Size(part.offsets)
                index = dcp.MetadataIndex(part.key, offsets, len(chunks[part.key]))
                storage[index] = _StorageInfo(Path(file).name, part.begin, part.saved.size)
                chunks[part.key].append(dcp.ChunkStorageMetadata(offsets, torch.Size(part.sizes)))
        for key, boxes in chunks.items():
            ends = [tuple(map(sum, zip(box.offsets, box.sizes, strict=True))) for box in boxes]
            size = torch.Size(map(max, zip(*ends, strict=True)))
            properties = dcp.TensorProperties(dtype=torch_dtype(self._dtypes[key]))
            entries[key] = dcp.TensorStorageMetadata(properties, size, boxes)
        aliases = second_names(entries) if self._second_names else {}
        for alias, key in aliases.items():
            entries[alias] = entries[key]
            storage[dcp.MetadataIndex(alias, torch.Size([0]), 0)] = storage[dcp.MetadataIndex(key, torch.Size([0]), 0)]
        empty_state = _StorageInfo(Path(self._last).name, self._empty_state, len(_no_state()))
        for key in extra_states([*self.specs, *aliases], max(self._experts.values(), default=1)):
            entries[key] = dcp.BytesStorageMetadata()
            storage[dcp.MetadataIndex(key)] = empty_state
        return dcp.Metadata(entries, planner_data=None, storage_data=storage, storage_meta=dcp.StorageMeta())


def _boxes(shape: tuple[int, ...], cuts: Cuts, first: int, end: int) -> Iterator[tuple[slice, ...]]:
    """The chunks of the rows from `first` to `end` of a tensor."""
    if not shape:
        yield ()
        return
    box = (slice(first, end), *(slice(0, size) for size in shape[1:]))
    low, high = box[cuts.axis].start, box[cuts.axis].stop
    edges = [low, *(start for start in cuts.starts if low < start < high), high]
    for start, stop in itertools.pairwise(edges):
        yield (*box[: cuts.axis], slice(start, stop), *box[cuts.axis + 1 :])


def _put_columns(spec: TensorSpec, parts: Sequence[_Part], file: WrittenFile, piece: Piece) -> None:
    """Writes chunks that are columns of a tensor, from several rows at a time."""
    rows, columns = spec.shape[:2]
    row = spec.nbytes // rows
    tensors = [SavedTensor(part.saved, file, part.begin) for part in parts]
    buffer = new_buffer(max(BUFFER, row)).data
    for first, end in row_cuts(rows, row):
        found = np.frombuffer(piece(first * row, end * row), np.uint8).reshape(end - first, columns, -1)
        for part, tensor in zip(parts, tensors, strict=True):
            begin, stop = (min(max(edge, first), end) - first for edge in (part.box[0].start, part.box[0].stop))
            chosen = found[begin:stop, part.box[1]]
            content = buffer[: chosen.nbytes]
            np.copyto(np.frombuffer(content, np.uint8).reshape(chosen.shape), chosen)
            tensor.append(content)
    for tensor in tensors:
        tensor.finish()


@functools.cache
def _no_state() -> bytes:
    """The object for every `_extra_state`."""
    return _saved([None])


def _saved(value: Any) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
