"""`open`: reads any checkpoint as named tensors, lazily."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ckptkit.converters.megatron.legacy import LegacyCheckpoint
from ckptkit.converters.planner import default_dialect, dims_of, to_megatron
from ckptkit.converters.stored import adapt_config
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, DamagedError
from ckptkit.core.extents import ByteRange, extents_of
from ckptkit.core.plan import View
from ckptkit.core.signature import public
from ckptkit.core.specs import TensorSpec, ranges
from ckptkit.formats.detect import Location, locate, refuse_hf, refuse_url
from ckptkit.formats.hf.remote import open_directory
from ckptkit.formats.hf.side_files import is_quantized
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.storage.buffers import elements
from ckptkit.storage.read import FileExtent, read_new
from ckptkit.storage.url import path_or_url
from ckptkit.verify.evidence.folding import by_key, layer_of
from ckptkit.verify.evidence.plain import as_release, open_plain, release_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Format = Literal["hf", "torch_dist", "legacy", "deltas"]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of a checkpoint, of which only the header was read.

    name: the name in the view that the tensor comes from.
    shape: the shape of the full tensor, also if ranks or files hold parts of it.
    dtype: the dtype that `read` returns (a quantized weight is dequantized), without `torch.`: `bfloat16`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    _checkpoint: Checkpoint = field(repr=False)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as a torch object. Imports torch."""
        return self._spec.torch_dtype

    @property
    def nbytes(self) -> int:
        """The bytes that `read` returns; a quantized weight has fewer on disk."""
        return self._spec.nbytes

    @property
    def files(self) -> list[str]:
        """Paths or URLs of the files with the tensor or its parts."""
        return self._checkpoint.files_of([self.name])

    def read(self) -> Tensor:
        """Reads the tensor to the CPU, contiguous, anew in each call.

        Raises CkptkitError if the file is damaged or cannot be dequantized, and OSError if it cannot be read.
        """
        return self._checkpoint.read([self.name])[self.name]

    def __getitem__(self, rows: slice) -> Tensor:
        """Some rows, equal to `read()[rows]`, for a slice of the first axis.

        Reads only these rows if they are contiguous in local files: in HF, and in large chunks of torch_dist, without
        verifying checksums. Otherwise reads the full tensor. Raises as `read`, and TypeError for another index.
        """
        if not isinstance(rows, slice):
            raise TypeError(f"{self.name}: index with a slice of rows, or index the result of read()")
        if (found := _rows(self._checkpoint, self._spec, rows)) is not None:
            return found
        return self.read()[rows]

    @property
    def _spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.shape, self.dtype)


class LazyTensors(Mapping[str, LazyTensor]):
    """Tensors by name, in the order in which they are read fastest. Safe to use from several threads."""

    def __init__(self, checkpoint: Checkpoint, names: Collection[str], where: str) -> None:
        self._checkpoint, self._where = checkpoint, where
        self._specs = checkpoint.specs
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> LazyTensor:
        """Raises KeyError for a name that is not there."""
        if name not in self._names:
            raise KeyError(f"{self._where} has no tensor {name!r}")
        spec = self._specs[name]
        return LazyTensor(spec.name, spec.shape, spec.dtype, self._checkpoint)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._where}: {len(self)} tensors>"

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Reads these tensors, or all, to the CPU; needs little more memory than they do.

        This is faster than one by one, since a tensor with several parts (q, k and v of Megatron) is read once.
        Raises as `LazyTensor.read`, and KeyError for an unknown name.
        """
        wanted = dict.fromkeys(self._names if names is None else (self[name].name for name in names))
        found: dict[str, Tensor] = {}
        for group in self._checkpoint.groups:
            if chosen := [name for name in group if name in wanted]:
                found |= self._checkpoint.read(chosen)
        return {name: found[name] for name in wanted}


class OpenedCheckpoint(LazyTensors):
    """A checkpoint with lazy tensors. It keeps no file open, so it needs no closing.

    path: the directory or URL of the weights.
    format: `hf`, `torch_dist`, `legacy` (Megatron's mp_rank_*), or `deltas` (replayed published weight updates).
    """

    def __init__(self, location: Location, stored: Checkpoint, view: Checkpoint, *, is_megatron: bool) -> None:
        super().__init__(view, view.specs, str(location.directory))
        self.path = self._where
        self.format: Format = "deltas" if location.kind == "deltas" else "hf"
        if location.kind == "megatron":
            self.format = "legacy" if location.legacy else "torch_dist"
        self._location, self._stored, self._is_megatron = location, stored, is_megatron

    @cached_property
    def words(self) -> str:
        """The format for people; for quantized weights with the scheme."""
        stored = self._stored
        if self.format == "hf" and isinstance(stored, View) and is_quantized(stored.source.config):
            from ckptkit.quant.formats.dequantize import format_of

            return f"HF, {format_of(stored.source.config).words}, dequantized"
        return _WORDS[self.format]

    @property
    def checkpoint(self) -> Checkpoint:
        """The tensors as the rest of ckptkit reads them."""
        return self._checkpoint

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's HF config.json, without `quantization_config`. Raises CkptkitError if Megatron has none."""
        return self._checkpoint.config

    @cached_property
    def layers(self) -> list[int]:
        """The numbers of the decoder layers with tensors here, without a vision tower."""
        return sorted(self._by_layer)

    def layer(self, number: int) -> LazyTensors:
        """The tensors of a decoder layer, counted from 0. Raises KeyError for an unknown layer."""
        if number not in self._by_layer:
            raise KeyError(f"{self._where} has no layer {number}; its layers are {ranges(self.layers or [-1])}")
        return LazyTensors(self._checkpoint, self._by_layer[number], f"{self._where}, layer {number}")

    def as_hf(self) -> OpenedCheckpoint:
        """The checkpoint under the names of an HF release, as `ckptkit convert` writes them.

        A vision tower, which Megatron lacks, comes from the HF directory of the config. Raises CkptkitError if the
        config is missing, or its model is another or not supported; reads no weight.
        """
        view = stored = self._stored
        if isinstance(stored, (TorchDistCheckpoint, LegacyCheckpoint)):
            root = self._location.root
            view = as_release(stored, root, release_of(stored, root))
        return OpenedCheckpoint(self._location, stored, view, is_megatron=False)

    def as_megatron(self) -> OpenedCheckpoint:
        """The checkpoint under the names of Megatron's GPTModel, or of HybridModel if only that has such layers.

        Norms have the names of Transformer Engine's layers (`linear_qkv.layer_norm_weight`), and there is no vision
        tower. A Megatron checkpoint keeps its names. Raises CkptkitError as `as_hf`.
        """
        view = stored = self._stored
        if self._location.kind != "megatron":
            view = to_megatron(stored, self._where, dialect=default_dialect(stored.config))
        return OpenedCheckpoint(self._location, stored, view, is_megatron=True)

    @cached_property
    def _by_layer(self) -> dict[int, list[str]]:
        root: str | None = "decoder."
        if not self._is_megatron:
            root = None  # of an unknown family
            with suppress(CkptkitError):
                root = dims_of(adapt_config(self.config, self._specs)).root
        pattern = re.compile(rf"{re.escape(root or '')}layers\.(\d+)(?:\.|$)")
        matches = ((name, pattern.match(name)) for name in self)
        numbers = ((layer_of(name) if root is None else match and int(match[1]), name) for name, match in matches)
        return by_key((number, name) for number, name in numbers if number is not None)


_WORDS: Mapping[Format, str] = {
    "hf": "HF",
    "torch_dist": "Megatron torch_dist",
    "legacy": "Megatron legacy (mp_rank_*)",
    "deltas": "HF, replayed from deltas",
}


@public()
def open(path: str | Path, *, hf: str | Path | None = None) -> OpenedCheckpoint:  # noqa: A001 - as `gzip.open`
    """Opens the checkpoint at `path` as named tensors, under the names on disk. Reads headers only.

    `path`: an HF directory of safetensors, local or at a URL (`hf://`, `s3://`, `gs://`); a Megatron root, `release/`
    or `iter_*/`, in torch_dist or the legacy format; or published deltas. Tensors of a quantized HF checkpoint (INT4,
    FP8, MXFP8, MXFP4, NVFP4) are dequantized when they are read.
    `hf`: the HF directory with the config of a Megatron checkpoint that stores none, or with the base of deltas.

    Raises CkptkitError if there is no checkpoint, headers are damaged, or the format is not supported.
    """
    if hf is not None:
        refuse_url(hf)
    with open_directory(path_or_url(path)) as local:
        location = locate(local)
        if location.kind == "hf":
            refuse_hf(hf, path)
        return open_location(location, hf)


def open_location(location: Location, hf: str | Path | None = None) -> OpenedCheckpoint:
    """Opens a checkpoint at a location, as `open` does."""
    stored = open_plain(location, hf)
    return OpenedCheckpoint(location, stored, stored, is_megatron=location.kind == "megatron")


def _rows(checkpoint: Checkpoint, spec: TensorSpec, rows: slice) -> Tensor | None:
    """Reads only these rows, or returns None if they are not contiguous. Raises DamagedError if a file is too short."""
    import torch

    if not spec.shape:
        return None
    first, last, step = rows.indices(spec.shape[0])
    extents = extents_of(checkpoint, spec.name)
    if step != 1 or last <= first or extents is None:
        return None
    width, at, ranges = spec.nbytes // spec.shape[0], 0, list[ByteRange]()
    for extent in extents:
        if not isinstance(extent, FileExtent):
            return None
        low, high = max(first * width, at), min(last * width, at + extent.nbytes)
        if low < high:
            ranges.append(ByteRange(extent.path, extent.offset + low - at, extent.offset + high - at))
        at += extent.nbytes
    parts = [read_new(one) for one in ranges]
    for one, part in zip(ranges, parts, strict=True):
        if len(part) < one.end - one.begin:
            raise DamagedError(f"{one.path}: {spec.name} is truncated", "copy or download the file again")
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    return elements(flat, spec.torch_dtype).view(last - first, *spec.shape[1:])
