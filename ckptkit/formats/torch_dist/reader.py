"""Reads Megatron's torch_dist format as global tensors, without megatron and without running anything in the file.

Understands what this project and megatron-core write: one key per layer or all layers stacked, experts on an axis or
one key each, gate and up together or apart, any grid of chunks, and `common.pt` (megatron-core up to 0.18) or a
`common_state` object (from 0.19). And Megatron-LM's `fsdp_dtensor` and `torch_dcp`, in the same kind of files.
"""

from __future__ import annotations

import itertools
import math
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
_MAX_BYTES = 1 << 60  # of a file or an axis: what is larger is a mistake, and no offset that the kernel takes
_MAX_NAMES = 500_000  # global tensors of one key or in all: a model of 10^12 parameters has 10^5
_MAX_COMPARED = 20_000_000  # pairs of chunks that could overlap, or chunks of one key by layer and expert
MAX_METADATA = 1 << 28  # bytes: a save of 10^12 parameters with its optimizer by 2048 ranks has about 10^8
_FIRST = attrgetter("offsets")
FOREIGN_HINT = (
    "nothing in it was run; where you trust it, load it with Megatron itself, leave that out and save it again"
)
_DAMAGED = "no model has so many: the file is damaged; copy it again"

# The calibration of ModelOpt's simulated quantization, without which the weights are the same. Not so the factors of
# its smoothing (`_pre_quant_scale`), nor the scales of packed weights (`_scale`).
# Source: ModelOpt 0.47 `quantization/nn/modules/tensor_quantizer.py`.
CALIBRATION = re.compile(r".*_quantizer(?:\.\d+)*\._(?:amax|global_amax|bias_value)")
# What a trainer saves beside the weights. megatron-core numbers the state of chained optimizers (MoE) with a prefix.
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
    """A box of a tensor: where it starts, its size, and the blob that holds it."""

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
    """`.metadata` as data: tensors and the blobs of byte objects, by key of torch_dist, whatever the `layout`.

    `names`: every class and function that the pickle names (`module.name`). `by_torch`: torch's own planner wrote it,
    which notes how names are nested. NeMo has all keys under `module.`, its wrapper of Megatron's model.
    """

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, Blob]
    names: frozenset[str] = frozenset()
    by_torch: bool = False
    layout: Layout = "torch_dist"

    @property
    def keys(self) -> list[str]:
        """Of tensors and objects."""
        return [*self.tensors, *self.objects]


def read_metadata(path: Path) -> StoredMetadata:
    """`.metadata` of a torch_dist directory. Raises CkptkitError when it is missing, damaged or incomplete."""
    file = path / ".metadata"
    try:
        with gc_paused(), memory_for(file):
            return _read_metadata(path, file)
    except OSError as error:
        raise CkptkitError(
            f"{file}: {why_unreadable(file, error)}",
            "a torch_dist checkpoint needs it; was the save cut short?",
            code=code_of(error),
        ) from error
    except NotAllowed as error:
        raise UnsupportedError(f"{file} names {error.kind}, which torch does not write", FOREIGN_HINT) from error
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
        message = f"{file} holds {kind_of(content)} instead of the Metadata with two tables that torch writes"
        raise DamagedError(message)
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
        return StoredMetadata(
            _renamed(path, tensors, torch_dist_keys(tensors).__getitem__), objects, names, layout=layout
        )
    if not weights or not all(map(_WRAPPED.match, weights)):
        return StoredMetadata(tensors, objects, names, by_torch)
    objects = {_unwrapped(key): one for key, one in objects.items()}
    return StoredMetadata(_renamed(path, tensors, _unwrapped), objects, names, by_torch, "NeMo")


def _unwrapped(key: str) -> str:
    return _WRAPPER.sub(r"\1", key)


def _renamed(path: Path, tensors: Mapping[str, StoredTensor], name: Callable[[str], str]) -> dict[str, StoredTensor]:
    """The tensors under other keys. Raises DamagedError where two get the same one."""
    found: dict[str, StoredTensor] = {}
    for key, one in tensors.items():
        if (new := name(key)) in found:
            raise DamagedError(f"{path} holds {shortened(new)} twice, once as {shortened(key)}", "save it again")
        found[new] = StoredTensor(new, one.shape, one.dtype, one.chunks)
    return found


def _shapes(sizes: Sequence[Any]) -> Sequence[Shape | None]:
    """`_shape` of each, checked at once where all are plain: a large model has 10^5."""
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
        raise TypeError(f"{shortened(shape)} is not a shape and no place in a tensor")
    return shape


@dataclass(frozen=True)
class _Storage:
    """Where bytes lie by key and offsets, from `.metadata` in `path`; `files` caches the file paths found so far."""

    path: Path
    places: Mapping[tuple[str, Shape | None], Any]
    files: dict[str, Path] = field(default_factory=dict)

    def blob(self, key: str, offsets: Shape | None) -> Blob:
        """The bytes of one chunk, or of an object (offsets None)."""
        if (key, offsets) not in self.places:
            raise DamagedError(
                f"{self.path / '.metadata'} does not say where {key} at {offsets} is stored",
                "the checkpoint is incomplete",
            )
        info = self.places[key, offsets]
        if getattr(info, "transform_descriptors", None):
            raise CkptkitError(
                f"{self.path}: {key} is stored transformed ({shortened(info.transform_descriptors)})",
                "save it without a storage transform",
            )
        name = info.relative_path
        if name not in self.files:
            if Path(name).name != name or "\0" in name:
                raise DamagedError(
                    f"{self.path / '.metadata'} puts {key} into {name!r}, which is not a file of this directory",
                    "the file is damaged or was made to mislead; copy the checkpoint again",
                )
            self.files[name] = self.path / name
        return Blob(self.files[name], info.offset, info.length)


def _stored(storage: _Storage, key: str, entry: Any) -> StoredTensor:
    shape = _shape(entry.size) or ()
    offsets = _shapes([chunk.offsets for chunk in entry.chunks])
    sizes = _shapes([chunk.sizes for chunk in entry.chunks])
    boxes = [(begin or (), size or ()) for begin, size in zip(offsets, sizes, strict=True)]
    if any(len(begin) != len(shape) or len(size) != len(shape) for begin, size in boxes):
        raise TypeError(f"{key} has {len(shape)} axes, and its chunks have others")
    chunks = tuple([Chunk(begin, size, storage.blob(key, begin)) for begin, size in boxes])
    return StoredTensor(key, shape, _dtype(entry.properties), chunks)


def _dtype(properties: Any) -> str:
    # TensorProperties pickles itself as the tuple (dtype, layout, requires_grad, memory format, pin_memory).
    dtype = properties.state[0]
    if not isinstance(dtype, Dtype):
        raise TypeError(f"{shortened(dtype)} is not a dtype")
    return dtype.name


def tiling_problem(shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> str | None:
    """Why these (offsets, sizes) boxes do not cover `shape` exactly once each; None when they do."""
    if len(boxes) == 1 and boxes[0] == ((0,) * len(shape), shape):
        return None
    boxes = sorted(boxes)
    low = np.array([offsets for offsets, _ in boxes], dtype=np.int64).reshape(len(boxes), len(shape))
    high = low + np.array([sizes for _, sizes in boxes], dtype=np.int64).reshape(low.shape)
    if (low < 0).any() or (high > np.array(shape, dtype=np.int64)).any():
        return "a chunk is outside the tensor"
    # A box can overlap only boxes that begin before it ends on the first axis. With a thousand experts, these are few.
    ends = np.searchsorted(low[:, 0], high[:, 0]) if shape else np.full(len(boxes), len(boxes))
    after = (ends - np.arange(1, len(boxes) + 1)).clip(0)
    if after.sum() > _MAX_COMPARED:
        return f"{len(boxes)} chunks of which too many share rows to be compared"
    for first, others in _to_compare(after):
        overlap = np.minimum(high[first], high[others]) > np.maximum(low[first], low[others])
        if (found := overlap.all(axis=1)).any():
            return f"two chunks overlap at {low[np.broadcast_to(first, found.shape)[found.argmax()]].tolist()}"
    missing = math.prod(shape) - sum(math.prod(sizes) for _, sizes in boxes)
    return f"{missing} of {math.prod(shape)} elements are in no chunk" if missing else None


def _to_compare(after: np.ndarray[Any, np.dtype[np.int64]]) -> Iterator[tuple[Any, Any]]:
    """Indices of boxes to compare: each with as many of those behind it as `after` says, in as few steps as can be."""
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
    """A stored tensor, the indices of its leading axes that select a global one, and the chunks that hold this."""

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
            place = tuple(
                slice(start, start + size)
                for start, size in zip(chunk.offsets[depth:], chunk.sizes[depth:], strict=True)
            )
            result[place] = chunk.blob.tensor(dtype, chunk.sizes, reader)[self._within(chunk)]
        return result

    def stretch(self, element: int) -> FileExtent | None:
        """As `TorchDistCheckpoint.stretch`, of this part."""
        at = (*self.index, *map(int, np.unravel_index(element, self.shape)))
        chunk = next((one for one in self.chunks if _holds(one, at)), None)
        extent = None if chunk is None else chunk.blob.dense(self.stored.dtype, chunk.sizes)
        if chunk is None or extent is None:
            return None
        inside = [one - start for one, start in zip(at, chunk.offsets, strict=True)]
        # Beyond the last axis along which the chunk does not hold all of the tensor, something else follows.
        axis = max(len(at) - 1, 0)
        while axis > len(self.index) and chunk.sizes[axis] == self.stored.shape[axis]:
            axis -= 1
        strides = dense_stride(chunk.sizes)
        passed = sum(one * stride for one, stride in zip(inside[axis:], strides[axis:], strict=True))
        begin = sum(one * stride for one, stride in zip(inside, strides, strict=True))
        size = ITEMSIZE[self.stored.dtype]
        return FileExtent(extent.path, extent.offset + begin * size, (math.prod(chunk.sizes[axis:]) - passed) * size)

    def _within(self, chunk: Chunk) -> Shape:
        """Its index in a chunk, which may hold others too."""
        return tuple(at - start for at, start in zip(self.index, chunk.offsets, strict=False))


def _holds(chunk: Chunk, at: Shape) -> bool:
    """Whether an element of the stored tensor lies in a chunk."""
    return all(start <= one < start + size for one, start, size in zip(at, chunk.offsets, chunk.sizes, strict=True))


class TorchDistCheckpoint:
    """A torch_dist directory (`release/`, `iter_*/`) as global tensors, whose chunks must tile them. Reads metadata.

    The HF config comes from `hf`, or from what `ckptkit convert` stored in `hf/` beside the iteration.
    """

    def __init__(self, path: str | Path, hf: str | Path | Directory | None = None) -> None:
        self.path = Path(path).absolute()
        self.hf = hf_home(self.path, hf)
        self.metadata = read_metadata(self.path)
        refuse_plain_dcp(self.path, self.metadata.keys, self.metadata.by_torch)
        self._logical = self._name_once()
        for stored in {id(part.stored): part.stored for parts in self._logical.values() for part in parts}.values():
            if problem := tiling_problem(stored.shape, [(chunk.offsets, chunk.sizes) for chunk in stored.chunks]):
                raise DamagedError(
                    f"{self.path}: {stored.key}: {problem}",
                    "the save is incomplete; loading it would leave garbage there",
                )

    def _name_once(self) -> dict[str, tuple[Part, ...]]:
        """Every global tensor by name. Raises CkptkitError when two keys hold the same one, e.g. stacked and not."""
        named: dict[str, tuple[Part, ...]] = {}
        for name, parts in self._name_all():
            if len(named) >= _MAX_NAMES:
                raise DamagedError(f"{self.path} claims to hold more than {_MAX_NAMES} tensors", _DAMAGED)
            if name in named:
                keys = f"{named[name][0].stored.key} and {parts[0].stored.key}"
                raise DamagedError(
                    f"{self.path}: {keys} both hold {name}", "two saves were mixed: save again into an empty directory"
                )
            named[name] = parts
        return named

    def _name_all(self) -> Iterator[tuple[str, tuple[Part, ...]]]:
        """Every global tensor with its parts: one, or several where Megatron saved its rows apart."""
        apart: dict[tuple[str, tuple[str, ...]], dict[str, Part]] = {}
        for name, part in self._name_parts():
            if whole := joined_name(name):
                apart.setdefault(whole, {})[name.removeprefix(whole[0])] = part
            else:
                yield name, (part,)
        for (name, suffixes), parts in apart.items():
            if missing := [suffix for suffix in suffixes if suffix not in parts]:
                raise DamagedError(
                    f"{self.path}: {name} lacks its part {missing[0]}", "the save is incomplete: save again"
                )
            yield name, tuple(parts[suffix] for suffix in suffixes)

    def _name_parts(self) -> Iterator[tuple[str, Part]]:
        weights = {key: stored for key, stored in self.metadata.tensors.items() if not NOT_WEIGHTS.fullmatch(key)}
        for key, stored in weights.items():
            name = engine_name(key, weights)
            if name == key or name not in weights:
                yield from parts_of(name, stored)
            elif [chunk.blob for chunk in stored.chunks] != [chunk.blob for chunk in weights[name].chunks]:
                raise DamagedError(
                    f"{self.path}: {key} and {name} are two names of one norm but are stored apart",
                    "Megatron's specs would load different models: save again with one --transformer-impl, keep this "
                    "save",
                )

    @property
    def hf_path(self) -> Path:
        """The HF directory on this machine that gives the config; it need not exist."""
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
        """What Megatron stores once: `args`, `iteration`, `content_metadata`. Unknown classes are inert Records."""
        file = self.path / "common.pt"
        if file.exists():
            return _mapping(Blob(file, 0, file.stat().st_size))
        for key, blob in self.metadata.objects.items():
            if key.startswith("common_state/"):
                return _mapping(blob)
        if self.metadata.layout in OF_FSDP:
            return {key: blob.object() for key, blob in self.metadata.objects.items() if key in COMMON}
        raise MissingError(
            f"{self.path} has neither common.pt nor a common_state object",
            "the save was cut short; Megatron cannot load it",
        )

    @property
    def args(self) -> Mapping[str, Any]:
        """The stored training arguments; empty when there are none. Raises CkptkitError for another type."""
        stored = self.common.get("args")
        if stored is not None and not hasattr(stored, "__dict__"):
            raise DamagedError(
                f"{self.path}: the stored training arguments are {type(stored).__name__}, no namespace",
                "the checkpoint is damaged",
            )
        found = dict(vars(stored)) if stored is not None else {}
        if not is_bounded(found):
            raise DamagedError(f"{self.path}: the stored training arguments have no end", "the checkpoint is damaged")
        return found

    def files_of(self, names: Sequence[str]) -> list[str]:
        return list(dict.fromkeys(str(wanted.path) for wanted in self.byte_ranges(names)))

    def byte_ranges(self, names: Iterable[str]) -> Iterator[ByteRange]:
        for blob in {
            id(chunk): chunk.blob for name in names for part in self._logical[name] for chunk in part.chunks
        }.values():
            yield blob.byte_range

    def is_streamable(self, name: str) -> bool:
        # Every chunk is whole rows of it and of nothing else.
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
            for chunk in sorted(part.chunks, key=_FIRST)
        ]
        return None if None in found else [extent for extent in found if extent is not None]

    def stretch(self, name: str, element: int) -> FileExtent | None:
        """The bytes of a tensor from an element on, counted row by row, as far as they follow one another in a file.

        None where its chunks do not hold that element, or not row by row. Raises CkptkitError as `Blob.tensor`.
        """
        for part in self._logical[name]:
            if element < math.prod(part.shape):
                return part.stretch(element)
            element -= math.prod(part.shape)
        return None

    def read(self, names: Sequence[str], reader: Reader | None = None) -> dict[str, Tensor]:
        import torch

        return {
            name: parts[0]
            if len(parts := [part.read(reader) for part in self._logical[name]]) == 1
            else torch.cat(parts)
            for name in names
        }


def _mapping(blob: Blob) -> Mapping[str, Any]:
    content = blob.object()
    content = content[0] if isinstance(content, list) and content else content
    if not isinstance(content, dict):
        message = f"{blob}: Megatron's common state is {kind_of(content)}, not a dict"
        raise DamagedError(message, "the checkpoint is damaged")
    return content


def parts_of(key: str, stored: StoredTensor) -> Iterator[tuple[str, Part]]:
    """Every global tensor that a key holds: one a layer where layers are stacked, one an expert where experts are."""
    stacked, routed = _STACKED.fullmatch(key) is not None, _EXPERTS.fullmatch(key) is not None
    depth = stacked + routed
    if len(stored.shape) < depth:
        raise DamagedError(f"{key} has {len(stored.shape)} axes, too few for layers or experts")
    if math.prod(stored.shape[:depth]) > _MAX_NAMES:
        raise DamagedError(f"{key} claims to hold {math.prod(stored.shape[:depth])} tensors", _DAMAGED)
    left = _MAX_COMPARED
    chunks: dict[Shape, list[Chunk]] = {index: [] for index in itertools.product(*map(range, stored.shape[:depth]))}
    one = (1,) * depth
    for chunk in stored.chunks:
        if chunk.sizes[:depth] == one and chunk.offsets[:depth] in chunks:
            chunks[chunk.offsets[:depth]].append(chunk)
            continue
        box = [
            range(start, min(start + size, whole))
            for start, size, whole in zip(chunk.offsets[:depth], chunk.sizes[:depth], stored.shape[:depth], strict=True)
        ]
        left -= math.prod(map(len, box))
        if left < 0:
            raise DamagedError(f"{key} has {len(stored.chunks)} chunks, which hold it many times over", _DAMAGED)
        for index in itertools.product(*box):
            if index in chunks:
                chunks[index].append(chunk)
    template = _STACKED.sub(r"\1.\0.\2", key) if stacked else key
    template = _EXPERTS.sub(r"\1.\0.\2", template) if routed else template
    before, *between = template.split("\0")
    for index in chunks:
        name = before + "".join([f"{number}{text}" for number, text in zip(index, between, strict=True)])
        yield name, Part(stored, index, tuple(chunks[index]))
