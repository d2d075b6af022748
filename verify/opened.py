"""`open`: any checkpoint as named tensors that are read when they are asked for."""

from __future__ import annotations

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
from ckptkit.core.specs import TensorSpec, ranges
from ckptkit.formats.detect import Location, locate, refuse_hf, refuse_url
from ckptkit.formats.hf.remote import open_directory
from ckptkit.formats.hf.side_files import is_quantized
from ckptkit.formats.torch_dist.reader import TorchDistCheckpoint
from ckptkit.storage.buffers import elements
from ckptkit.storage.read import FileExtent, read_new
from ckptkit.storage.url import path_or_url
from ckptkit.verify.evidence.folding import layer_of
from ckptkit.verify.evidence.plain import as_release, open_plain, release_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Format = Literal["hf", "torch_dist", "legacy", "deltas"]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of a checkpoint. Nothing but headers has been read of it.

    name: in the view that it was taken from.
    shape: of the whole tensor, whatever ranks or files it is cut into.
    dtype: that `read` gives, as torch spells it without `torch.`: `bfloat16`. Of a weight that is stored in INT4 or a
        small float, the one that it dequantizes to.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    _checkpoint: Checkpoint = field(repr=False)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's object. Imports torch."""
        return self._spec.torch_dtype

    @property
    def nbytes(self) -> int:
        """Bytes that `read` gives; a quantized weight has fewer on disk."""
        return self._spec.nbytes

    @property
    def files(self) -> list[str]:
        """Paths or URLs of the files that it is read from: several where ranks, or parts of it, have one each."""
        return self._checkpoint.files_of([self.name])

    def read(self) -> Tensor:
        """The tensor on the CPU, contiguous, with this shape and dtype; each call reads it again.

        Raises CkptkitError, naming file and tensor, where the file is damaged or holds what cannot be dequantized, and
        OSError where it cannot be read.
        """
        return self._checkpoint.read([self.name])[self.name]

    def __getitem__(self, rows: slice) -> Tensor:
        """Some rows, as `read()[rows]` gives them, for a slice over the first axis.

        No more than these rows is read where they follow one another in local files: of HF, and of torch_dist in large
        chunks, whose checksums then are not verified. Of all other tensors the whole is read first.
        Raises as `read`, and TypeError for another index.
        """
        if not isinstance(rows, slice):
            raise TypeError(f"{self.name}: take rows with a slice, and anything else of what read() gives")
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
        """These tensors, or all of them, on the CPU; memory holds them and little more.

        Faster than one by one: what several are cut from (q, k and v of Megatron's one tensor) is read once.
        Raises as `LazyTensor.read`, and KeyError for a name that is not there.
        """
        wanted = dict.fromkeys(self._names if names is None else (self[name].name for name in names))
        found: dict[str, Tensor] = {}
        for group in self._checkpoint.groups:
            if chosen := [name for name in group if name in wanted]:
                found |= self._checkpoint.read(chosen)
        return {name: found[name] for name in wanted}


class OpenedCheckpoint(LazyTensors):
    """A checkpoint whose tensors are read lazily. It keeps no file open, so that there is nothing to close.

    path: the directory or URL of the weights.
    format: how they are stored: `hf` (safetensors, quantized or not), `torch_dist`, `legacy` (Megatron's mp_rank_*), or
        `deltas` (the newest version that published weight updates lead to).
    """

    def __init__(self, location: Location, stored: Checkpoint, view: Checkpoint, *, is_megatron: bool) -> None:
        super().__init__(view, view.specs, str(location.directory))
        self.path = self._where
        self.format: Format = "deltas" if location.is_deltas else "hf"
        if location.is_megatron:
            self.format = "legacy" if location.legacy else "torch_dist"
        self._location, self._stored, self._is_megatron = location, stored, is_megatron

    @cached_property
    def words(self) -> str:
        """The format in words, for people; of quantized weights with the scheme."""
        stored = self._stored
        if self.format == "hf" and isinstance(stored, View) and is_quantized(stored.source.config):
            from ckptkit.quant.formats.dequantize import format_of

            return f"HF, {format_of(stored.source.config).words}, dequantized"
        return _WORDS[self.format]

    @property
    def checkpoint(self) -> Checkpoint:
        """The same tensors as the rest of ckptkit reads them."""
        return self._checkpoint

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's HF config.json, without its `quantization_config`.

        Raises CkptkitError for a Megatron checkpoint that has none beside it and was given none.
        """
        return self._checkpoint.config

    @cached_property
    def layers(self) -> list[int]:
        """The numbers of the decoder layers that have tensors here; not those of a vision tower."""
        return sorted(self._by_layer)

    def layer(self, number: int) -> LazyTensors:
        """The tensors of a decoder layer, counted from 0, under their names here. Raises KeyError for one not here."""
        if number not in self._by_layer:
            raise KeyError(f"{self._where} has no layer {number}; its layers are {ranges(self.layers or [-1])}")
        return LazyTensors(self._checkpoint, self._by_layer[number], f"{self._where}, layer {number}")

    def as_hf(self) -> OpenedCheckpoint:
        """The same under the names of an HF release, as `ckptkit convert` writes them; HF is returned as it is.

        What Megatron does not hold (a vision tower) comes from the HF directory that gives the config, or from beside
        the checkpoint. Raises CkptkitError where the config is missing, of another model or of a family that is not
        supported; no weight is read for that.
        """
        stored = self._stored
        if not isinstance(stored, (TorchDistCheckpoint, LegacyCheckpoint)):
            return OpenedCheckpoint(self._location, stored, stored, is_megatron=False)
        root = self._location.root
        view = as_release(stored, root, release_of(stored, root))
        return OpenedCheckpoint(self._location, stored, view, is_megatron=False)

    def as_megatron(self) -> OpenedCheckpoint:
        """The same under the names of Megatron's GPTModel; of a model that only HybridModel holds, of that.

        Norms are named as in Transformer Engine's layers (`linear_qkv.layer_norm_weight`).
        A Megatron checkpoint is returned under its own names. There is no vision tower. Raises CkptkitError as `as_hf`.
        """
        stored = self._stored
        if not self._location.is_megatron:
            view = to_megatron(stored, self._where, dialect=default_dialect(stored.config))
            return OpenedCheckpoint(self._location, stored, view, is_megatron=True)
        return OpenedCheckpoint(self._location, stored, stored, is_megatron=True)

    @cached_property
    def _by_layer(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        prefix: str | None = "decoder.layers."
        if not self._is_megatron:
            prefix = None  # of a family that is not known, whose names are taken as they are
            with suppress(CkptkitError):
                prefix = f"{dims_of(adapt_config(self.config, self._specs)).root}layers."
        for name in self:
            if prefix is None:
                number = layer_of(name)
            else:
                first = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
                number = int(first) if first.isdecimal() else None
            if number is not None:
                found.setdefault(number, []).append(name)
        return found


_WORDS: Mapping[Format, str] = {
    "hf": "HF",
    "torch_dist": "Megatron torch_dist",
    "legacy": "Megatron legacy (mp_rank_*)",
    "deltas": "HF, replayed from deltas",
}


def open(path: str | Path, *, hf: str | Path | None = None) -> OpenedCheckpoint:  # noqa: A001 - as `gzip.open`
    """Opens the checkpoint at `path` as named tensors, under the names that it has on disk. Reads headers only.

    `path`: an HF directory of safetensors, here or at a URL (`hf://`, `s3://`, `gs://`); a Megatron root, `release/` or
    `iter_*/`, in torch_dist or the legacy format; or published deltas. Of a quantized HF checkpoint (INT4, FP8, MXFP8,
    MXFP4, NVFP4) the tensors are those of the model before, each dequantized when it is read.
    `hf`: the HF directory that gives the config of a Megatron checkpoint that has none beside it; of deltas their base.

    Raises CkptkitError where there is no checkpoint, headers are damaged, or the format is not read.
    """
    if hf is not None:
        refuse_url(hf)
    with open_directory(path_or_url(path)) as here:
        location = locate(here)
        if location.is_hf:
            refuse_hf(hf, path)
        return opened_at(location, hf)


def opened_at(location: Location, hf: str | Path | None = None) -> OpenedCheckpoint:
    """The same of what was located."""
    stored = open_plain(location, hf)
    return OpenedCheckpoint(location, stored, stored, is_megatron=location.is_megatron)


def _rows(checkpoint: Checkpoint, spec: TensorSpec, rows: slice) -> Tensor | None:
    """Rows read by themselves; None where they do not follow one another in files.

    Raises DamagedError where a file ends before them.
    """
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
            raise DamagedError(f"{one.path}: {spec.name} is cut short", "copy or download the file again")
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    return elements(flat, spec.torch_dtype).view(last - first, *spec.shape[1:])
