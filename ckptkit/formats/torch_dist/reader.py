"""Reads Megatron's torch_dist format as global tensors, without megatron and without running code from the file.

Supports the output of this project and megatron-core: one key per layer or all layers stacked, experts on an axis or
one key each, gate and up joined or split, any grid of chunks, `common.pt` (megatron-core up to 0.18) or a
`common_state` object (from 0.19); and Megatron-LM's `fsdp_dtensor` and `torch_dcp`, which use the same files.
"""

from __future__ import annotations

import itertools
import math
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ckptkit.core.allocator import gc_paused
from ckptkit.core.dtypes import ITEMSIZE, torch_dtype
from ckptkit.core.errors import CkptkitError, DamagedError, MissingError, UnsupportedError, code_of, memory_for
from ckptkit.core.extents import ByteRange, Extent, Reader
from ckptkit.core.printable import shortened
from ckptkit.core.specs import MAX_AXES, TensorSpec, long_name
from ckptkit.formats.hf.side_files import config_in, hf_home
from ckptkit.formats.torch_dist.names import engine_name, joined_name
from ckptkit.formats.torch_dist.plain_dcp import COMMON, fsdp_format, refuse_plain_dcp, torch_dist_keys
from ckptkit.formats.torch_save import unpickle
from ckptkit.formats.torch_save.blob import Blob, dense_stride
from ckptkit.formats.torch_save.records import Dtype, NotAllowed, is_bounded, kind_of
from ckptkit.storage.directory import Directory
from ckptkit.storage.links import why_unreadable
from ckptkit.storage.read import FileExtent
from ckptkit.storage.regular import read_regular

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
Layout = Literal["torch_dist", "NeMo", "fsdp_dtensor", "torch_dcp"]
OF_FSDP: tuple[Layout, ...] = ("fsdp_dtensor", "torch_dcp")
_MAX_BYTES = 1 << 60  # of a file or an axis; a larger size is a fault
_MAX_NAMES = 500_000  # global tensors of one key or of all: a model of 10^12 parameters has 10^5
_MAX_COMPARED = 20_000_000  # pairs of chunks that could overlap, or chunks of one key by layer and expert
MAX_METADATA = 1 << 28  # bytes: a save of 10^12 parameters with its optimizer by 2048 ranks has about 10^8
FOREIGN_HINT = "if you trust it, load it with Megatron and save it again without this (ckptkit ran none of its code)"
_AGAIN = "copy the checkpoint again: it is damaged"
_DAMAGED = "copy the file again: it is damaged, since no model has so many"

# The calibration of ModelOpt's simulated quantization, which does not affect the weights, unlike the factors of its
# smoothing (`_pre_quant_scale`) and the scales of packed weights (`_scale`).
# Source: ModelOpt 0.47 `quantization/nn/modules/tensor_quantizer.py`.
CALIBRATION = re.compile(r".*_quantizer(?:\.\d+)*\._(?:amax|global_amax|bias_value)")
# Training state next to the weights. megatron-core adds a numbered prefix for chained optimizers (MoE).
NOT_WEIGHTS = re.compile(
    r"(?:chained_\d+\.)?optimizer\..*|.*\._extra_state(/.*)?|rng_state.*|rerun_state_machine.*|common_state.*|opt_param_scheduler.*|"
    + CALIBRATION.pattern
)
_WRAPPED = re.compile(r"module\.(?:decoder|embedding|mtp|output_layer)\.")
_WRAPPER = re.compile(r"^((?:chained_\d+\.)?optimizer\.state\.[a-z0-9_]+\.)?module\.")
_STACKED = re.compile(r"(decoder\.layers)\.(?!\d+\.)(.+)")
_EXPERTS = re.compile(r"(.*\.experts\.experts)\.(?!\d+\.)(.+)")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor: its offsets, its sizes, and its blob."""

    offsets: Shape
    sizes: Shape
    blob: Blob


@dataclass(frozen=True)
class StoredTensor:
    """One key of `.metadata`: the global tensor and its chunks."""

    key: str
    shape: Shape
    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class StoredMetadata:
    """The contents of `.metadata`: tensors and the blobs of byte objects, by key of torch_dist in every `layout`.

    `names`: every class and function in the pickle (`module.name`). `by_torch`: written by torch's planner, with data
    on nested names. NeMo has all keys under `module.`, its wrapper of Megatron's model.
    """

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, Blob]
    names: frozenset[str] = frozenset()
    by_torch: bool = False
    layout: Layout = "torch_dist"

    @property
    def keys(self) -> list[str]:
        """The keys of tensors and objects."""
        return [*self.tensors, *self.objects]


def read_metadata(path: Path) -> StoredMetadata:
    """`.metadata` of a torch_dist directory. Raises CkptkitError if it is missing, damaged or incomplete."""
    file = path / ".metadata"
    try:
        with gc_paused(), memory_for(file):
            return _read_metadata(path, file)
    except OSError as error:
        hint = "copy or save the checkpoint again: torch_dist requires this file"
        raise CkptkitError(f"{file}: {why_unreadable(file, error)}", hint, code=code_of(error)) from error
    except NotAllowed as error:
        raise UnsupportedError(f"{file} contains {error.kind}, which torch does not write", FOREIGN_HINT) from error
    except AttributeError as error:
        message = f"{file} is not DCP metadata: it has a part of type {kind_of(error.obj)}, which has no {error.name}"
        raise DamagedError(message) from error
    except (pickle.UnpicklingError, TypeError, LookupError) as error:
        raise DamagedError(f"{file} is not DCP metadata: {error}") from error


def _read_metadata(path: Path, file: Path) -> StoredMetadata:
    named = dict[str, bool]()
    content = unpickle.loads(read_regular(file, MAX_METADATA), lambda name: named.setdefault(name, True))
    names = frozenset(named)
    tables = [getattr(content, key, None) for key in ("storage_data", "state_dict_metadata")]
    if not all(isinstance(one, dict) for one in tables):
        raise DamagedError(f"{file} contains {kind_of(content)} instead of torch's Metadata with its tables")
    keys = [index.fqn for index in content.storage_data]
    offsets = _shapes([getattr(index, "offset", None) for index in content.storage_data])
    places = dict(zip(zip(keys, offsets, strict=True), content.storage_data.values(), strict=True))
    _shapes([(info.offset, info.length) for info in places.values()])
    storage, entries = _Storage(path, places), content.state_dict_metadata
    if not all(type(key) is str and "\0" not in key for key in entries):
        raise TypeError("a tensor or an object has no name")
    if problem := long_name(entries):
        raise TypeError(problem)
    objects = {
        key: storage.blob(key, None) for key, entry in entries.items() if entry.kind.endswith(".BytesStorageMetadata")
    }
    tensors = {key: _stored(storage, key, entry) for key, entry in entries.items() if key not in objects}
    by_torch = bool(getattr(content, "planner_data", None))
    weights = [key for key in tensors if not NOT_WEIGHTS.fullmatch(key)]
    if by_torch and (layout := fsdp_format(entries)):
        return StoredMetadata(_rename(path, tensors, torch_dist_keys(tensors)), objects, names, layout=layout)
    if not weights or not all(map(_WRAPPED.match, weights)):
        return StoredMetadata(tensors, objects, names, by_torch)
    unwrapped = {key: _WRAPPER.sub(r"\1", key) for key in entries}
    objects = {unwrapped[key]: one for key, one in objects.items()}
    return StoredMetadata(_rename(path, tensors, unwrapped), objects, names, by_torch, "NeMo")


def _rename(path: Path, tensors: Mapping[str, StoredTensor], keys: Mapping[str, str]) -> dict[str, StoredTensor]:
    """The tensors under other keys. Raises DamagedError if two get the same key."""
    found: dict[str, StoredTensor] = {}
    for key, one in tensors.items():
        if (new := keys[key]) in found:
            raise DamagedError(f"{path} contains {shortened(new)} twice, once as {shortened(key)}", "save it again")
        found[new] = StoredTensor(new, one.shape, one.dtype, one.chunks)
    return found


def _shapes(sizes: Sequence[Any]) -> Sequence[Shape | None]:
    """`_shape` of each, with one check if all are plain tuples: a large model has 10^5."""
    present = [size for size in sizes if size is not None]
    if {tuple}.issuperset(map(type, present)) and max(map(len, present), default=0) <= MAX_AXES:
        numbers = list(itertools.chain.from_iterable(present))
        plain = {int}.issuperset(map(type, numbers)) and min(numbers, default=0) >= 0
        if plain and max(numbers, default=0) <= _MAX_BYTES:
            return sizes
    return [_shape(size) for size in sizes]


def _shape(size: Any) -> Shape | None:
    if size is None:
        return None
    shape = tuple(size)
    if len(shape) > MAX_AXES or not all(type(number) is int and 0 <= number <= _MAX_BYTES for number in shape):
        raise TypeError(f"{shortened(shape)} is not a shape or a position in a tensor")
    return shape


@dataclass(frozen=True)
class _Storage:
    """Positions of bytes by key and offsets, from `.metadata` in `path`; `files` caches the paths of files."""

    path: Path
    places: Mapping[tuple[str, Shape | None], Any]
    files: dict[str, Path] = field(default_factory=dict)

    def blob(self, key: str, offsets: Shape | None) -> Blob:
        """The bytes of one chunk, or of an object (offsets None)."""
        if (key, offsets) not in self.places:
            message = f"{self.path / '.metadata'} has no file for the chunk of {key} at {offsets}"
            raise DamagedError(message, "copy the checkpoint again: it is incomplete")
        info = self.places[key, offsets]
        if getattr(info, "transform_descriptors", None):
            message = f"{self.path}: {key} is stored transformed ({shortened(info.transform_descriptors)})"
            raise CkptkitError(message, "save it without a storage transform")
        name = info.relative_path
        if name not in self.files:
            if Path(name).name != name or "\0" in name:
                message = f"{self.path / '.metadata'} puts {key} into {name!r}, which is not a file of this directory"
                raise DamagedError(message, "copy the checkpoint again: this file is damaged or manipulated")
            self.files[name] = self.path / name
        return Blob(self.files[name], info.offset, info.length)


def _stored(storage: _Storage, key: str, entry: Any) -> StoredTensor:
    shape = _shape(entry.size) or ()
    offsets = _shapes([chunk.offsets for chunk in entry.chunks])
    sizes = _shapes([chunk.sizes for chunk in entry.chunks])
    boxes = [(begin or (), size or ()) for begin, size in zip(offsets, sizes, strict=True)]
    if any(len(begin) != len(shape) or len(size) != len(shape) for begin, size in boxes):
        raise TypeError(f"{key} has {len(shape)} axes, but its chunks have another number")
    chunks = tuple([Chunk(begin, size, storage.blob(key, begin)) for begin, size in boxes])
    # TensorProperties is pickled as the tuple (dtype, layout, requires_grad, memory format, pin_memory).
    dtype = entry.properties.state[0]
    if not isinstance(dtype, Dtype):
        raise TypeError(f"{shortened(dtype)} is not a dtype")
    return StoredTensor(key, shape, dtype.name, chunks)


def tiling_problem(shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> str | None:
    """Why these (offsets, sizes) boxes do not cover every element of `shape` exactly once, or None."""
    if len(boxes) == 1 and boxes[0] == ((0,) * len(shape), shape):
        return None
    boxes = sorted(boxes)
    low = np.array([offsets for offsets, _ in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
    high = low + np.array([sizes for _, sizes in boxes], dtype=np.int64).reshape(low.shape)
    if (low < 0).any() or (high > np.array(shape, dtype=np.int64)).any():
        return "a chunk is outside the tensor"
    # A box can only overlap boxes that begin before it ends on the first axis; for many experts, these are few.
    ends = np.searchsorted(low[:, 0], high[:, 0]) if shape else np.full(len(boxes), len(boxes))
    after = (ends - np.arange(1, len(boxes) + 1)).clip(0)
    if after.sum() > _MAX_COMPARED:
        return f"too many of {len(boxes)} chunks share rows, so ckptkit cannot check their overlap"
    for first, second in _pairs(after):
        overlap = np.minimum(high[first], high[second]) > np.maximum(low[first], low[second])
        if (found := overlap.all(axis=1)).any():
            return f"two chunks overlap at {low[np.broadcast_to(first, found.shape)[found.argmax()]].tolist()}"
    missing = math.prod(shape) - sum(math.prod(sizes) for _, sizes in boxes)
    return f"{missing} of {math.prod(shape)} elements are in no chunk" if missing else None


def _pairs(after: np.ndarray[Any, np.dtype[np.int64]]) -> Iterator[tuple[Any, Any]]:
    """Indices of boxes to compare, in few steps: box i with the next `after[i]` boxes."""
    first = np.flatnonzero(after)
    if len(first) <= after.max(initial=0):
        for index in first:
            yield index, slice(index + 1, index + 1 + after[index])
        return
    for distance in range(1, int(after.max()) + 1):
        first = first[after[first] >= distance]
        yield first, first + distance


@dataclass(frozen=True, slots=True)
class Part:
    """A global tensor in a stored tensor: the index of its leading axes, and its chunks."""

    stored: StoredTensor
    index: Shape
    chunks: tuple[Chunk, ...]

    @property
    def shape(self) -> Shape:
        return self.stored.shape[len(self.index) :]

    def read(self, reader: Reader | None) -> Tensor:
        dtype, depth = self.stored.dtype, len(self.index)
        if len(self.chunks) == 1:
            return self.chunks[0].blob.tensor(dtype, self.chunks[0].sizes, reader)[self._within(self.chunks[0])]
        import torch

        result = torch.empty(self.shape, dtype=torch_dtype(dtype))
        for chunk in self.chunks:
            box = zip(chunk.offsets[depth:], chunk.sizes[depth:], strict=True)
            place = tuple(slice(start, start + size) for start, size in box)
            result[place] = chunk.blob.tensor(dtype, chunk.sizes, reader)[self._within(chunk)]
        return result

    def stretch(self, element: int) -> FileExtent | None:
        """Like `TorchDistCheckpoint.stretch`, for this part."""
        at = (*self.index, *map(int, np.unravel_index(element, self.shape)))
        chunk = next((one for one in self.chunks if _contains(one, at)), None)
        extent = None if chunk is None else chunk.blob.dense(self.stored.dtype, chunk.sizes)
        if chunk is None or extent is None:
            return None
        inside = [one - start for one, start in zip(at, chunk.offsets, strict=True)]
        # The stretch ends at the last axis along which the chunk has only a part of the tensor.
        axis = max(len(at) - 1, 0)
        while axis > len(self.index) and chunk.sizes[axis] == self.stored.shape[axis]:
            axis -= 1
        strides = dense_stride(chunk.sizes)
        passed = sum(one * stride for one, stride in zip(inside[axis:], strides[axis:], strict=True))
        begin = sum(one * stride for one, stride in zip(inside, strides, strict=True))
        size = ITEMSIZE[self.stored.dtype]
        return FileExtent(extent.path, extent.offset + begin * size, (math.prod(chunk.sizes[axis:]) - passed) * size)

    def _within(self, chunk: Chunk) -> Shape:
        """The index of this part in a chunk, which may also have other parts."""
        return tuple(at - start for at, start in zip(self.index, chunk.offsets, strict=False))


def _contains(chunk: Chunk, at: Shape) -> bool:
    return all(start <= one < start + size for one, start, size in zip(at, chunk.offsets, chunk.sizes, strict=True))


class TorchDistCheckpoint:
    """A torch_dist directory (`release/`, `iter_*/`) as global tensors. Reads metadata.

    The HF config comes from `hf`, or from `hf/` next to the iteration. Raises CkptkitError if chunks do not tile the
    tensors.
    """

    def __init__(self, path: str | Path, hf: str | Path | Directory | None = None) -> None:
        self.path = Path(path).absolute()
        self.hf = hf_home(self.path, hf)
        self.metadata = read_metadata(self.path)
        refuse_plain_dcp(self.path, self.metadata.keys, self.metadata.by_torch)
        self._logical: dict[str, tuple[Part, ...]] = {}  # the parts of every global tensor
        for name, parts in self._name_all():
            if len(self._logical) >= _MAX_NAMES:
                raise DamagedError(f"{self.path} declares more than {_MAX_NAMES} tensors", _DAMAGED)
            if name in self._logical:
                keys = f"{self._logical[name][0].stored.key} and {parts[0].stored.key}"
                hint = "save again into an empty directory: two saves are mixed"
                raise DamagedError(f"{self.path}: {keys} both contain {name}", hint)
            self._logical[name] = parts
        for stored in {id(part.stored): part.stored for parts in self._logical.values() for part in parts}.values():
            if problem := tiling_problem(stored.shape, [(chunk.offsets, chunk.sizes) for chunk in stored.chunks]):
                hint = "save again: this save is incomplete, and loading it would leave random values"
                raise DamagedError(f"{self.path}: {stored.key}: {problem}", hint)

    def _name_all(self) -> Iterator[tuple[str, tuple[Part, ...]]]:
        """Every global tensor with its part, or with several parts if Megatron saved its rows separately."""
        split: dict[tuple[str, tuple[str, ...]], dict[str, Part]] = {}
        for name, part in self._parts():
            if joined := joined_name(name):
                split.setdefault(joined, {})[name.removeprefix(joined[0])] = part
            else:
                yield name, (part,)
        for (name, suffixes), parts in split.items():
            if missing := [suffix for suffix in suffixes if suffix not in parts]:
                message = f"{self.path}: {name} lacks the part {missing[0]}"
                raise DamagedError(message, "save again: the save is incomplete")
            yield name, tuple(parts[suffix] for suffix in suffixes)

    def _parts(self) -> Iterator[tuple[str, Part]]:
        weights = {key: stored for key, stored in self.metadata.tensors.items() if not NOT_WEIGHTS.fullmatch(key)}
        for key, stored in weights.items():
            name = engine_name(key, weights)
            if name == key or name not in weights:
                yield from parts_of(name, stored)
            elif [chunk.blob for chunk in stored.chunks] != [chunk.blob for chunk in weights[name].chunks]:
                message = f"{self.path}: {key} and {name} are two names of one norm, but have different bytes"
                hint = "keep this save, and save again with one --transformer-impl: others load another model"
                raise DamagedError(message, hint)

    @property
    def hf_path(self) -> Path:
        """The local HF directory for the config; it may be missing."""
        return self.hf.path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return config_in(self.hf, self.path)

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        specs = {
            name: TensorSpec(
                name,
                (sum(part.shape[0] for part in parts), *parts[0].shape[1:]) if len(parts) > 1 else parts[0].shape,
                parts[0].stored.dtype,
            )
            for name, parts in self._logical.items()
        }
        return {name: specs[name] for name in sorted(specs, key=self._place)}

    def _place(self, name: str) -> tuple[str, int]:
        chunks = self._logical[name][0].chunks
        return (chunks[0].blob.path.name, chunks[0].blob.offset) if chunks else ("", 0)

    @property
    def groups(self) -> Sequence[tuple[str, ...]]:
        return [(name,) for name in self.specs]

    @cached_property
    def common(self) -> Mapping[str, Any]:
        """Megatron's common state: `args`, `iteration`, `content_metadata`. Unknown classes are inert Records."""
        file = self.path / "common.pt"
        if file.exists():
            return _mapping(Blob(file, 0, file.stat().st_size))
        for key, blob in self.metadata.objects.items():
            if key.startswith("common_state/"):
                return _mapping(blob)
        if self.metadata.layout in OF_FSDP:
            return {key: blob.object() for key, blob in self.metadata.objects.items() if key in COMMON}
        message = f"{self.path} has neither common.pt nor a common_state object"
        raise MissingError(message, "save again: the save was interrupted, and Megatron cannot load it")

    @property
    def args(self) -> Mapping[str, Any]:
        """The stored training arguments, or empty without any. Raises CkptkitError for another type."""
        stored, subject = self.common.get("args"), f"{self.path}: the stored training arguments are"
        if stored is not None and not hasattr(stored, "__dict__"):
            raise DamagedError(f"{subject} {type(stored).__name__}, not argparse.Namespace", _AGAIN)
        args = dict(vars(stored)) if stored is not None else {}
        if not is_bounded(args):
            raise DamagedError(f"{subject} too many or nested too deeply", _AGAIN)
        return args

    def files_of(self, names: Sequence[str]) -> list[str]:
        return list(dict.fromkeys(str(one.path) for one in self.byte_ranges(names)))

    def byte_ranges(self, names: Iterable[str]) -> Iterator[ByteRange]:
        chunks = (chunk for name in names for part in self._logical[name] for chunk in part.chunks)
        for blob in {id(chunk): chunk.blob for chunk in chunks}.values():
            yield blob.byte_range

    def is_streamable(self, name: str) -> bool:
        # Every chunk consists of complete rows of this tensor only.
        return all(
            not part.index and all(chunk.sizes[1:] == part.stored.shape[1:] for chunk in part.chunks)
            for part in self._logical[name]
        )

    def extents(self, name: str) -> Sequence[Extent] | None:
        if not self.is_streamable(name):
            return None
        found = [
            chunk.blob.extent(part.stored.dtype, chunk.sizes)
            for part in self._logical[name]
            for chunk in sorted(part.chunks, key=attrgetter("offsets"))
        ]
        return None if None in found else [extent for extent in found if extent is not None]

    def stretch(self, name: str, element: int) -> FileExtent | None:
        """Contiguous bytes of a tensor in a file, from an element on, counted row by row.

        None if its chunks lack that element or do not store rows in order. Raises CkptkitError like `Blob.tensor`.
        """
        for part in self._logical[name]:
            if element < math.prod(part.shape):
                return part.stretch(element)
            element -= math.prod(part.shape)
        return None

    def read(self, names: Sequence[str], reader: Reader | None = None) -> dict[str, Tensor]:
        import torch

        found = {name: [part.read(reader) for part in self._logical[name]] for name in names}
        return {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in found.items()}


def _mapping(blob: Blob) -> Mapping[str, Any]:
    content = blob.object()
    content = content[0] if isinstance(content, list) and content else content
    if not isinstance(content, dict):
        kind = kind_of(content)
        raise DamagedError(f"{blob}: Megatron's common state is {kind}, not a dict", _AGAIN)
    return content


def parts_of(key: str, stored: StoredTensor) -> Iterator[tuple[str, Part]]:
    """Every global tensor of a key: one per layer if layers are stacked, one per expert if experts are."""
    stacked, routed = _STACKED.fullmatch(key) is not None, _EXPERTS.fullmatch(key) is not None
    depth = stacked + routed
    if len(stored.shape) < depth:
        raise DamagedError(f"{key} has {len(stored.shape)} axes, too few for layers or experts")
    if math.prod(stored.shape[:depth]) > _MAX_NAMES:
        raise DamagedError(f"{key} declares {math.prod(stored.shape[:depth])} tensors", _DAMAGED)
    left = _MAX_COMPARED
    chunks: dict[Shape, list[Chunk]] = {index: [] for index in itertools.product(*map(range, stored.shape[:depth]))}
    single = (1,) * depth
    for chunk in stored.chunks:
        offsets, sizes = chunk.offsets[:depth], chunk.sizes[:depth]
        if sizes == single and offsets in chunks:
            chunks[offsets].append(chunk)
            continue
        axes = zip(offsets, sizes, stored.shape[:depth], strict=True)
        box = [range(start, min(start + size, end)) for start, size, end in axes]
        left -= math.prod(map(len, box))
        if left < 0:
            raise DamagedError(f"{key} has {len(stored.chunks)} chunks, which overlap too often", _DAMAGED)
        for index in itertools.product(*box):
            if index in chunks:
                chunks[index].append(chunk)
    template = _STACKED.sub(r"\1.\0.\2", key) if stacked else key
    template = _EXPERTS.sub(r"\1.\0.\2", template) if routed else template
    before, *between = template.split("\0")
    for index in chunks:
        name = before + "".join([f"{number}{text}" for number, text in zip(index, between, strict=True)])
        yield name, Part(stored, index, tuple(chunks[index]))
