"""Reads one safetensors file: its header with all faults, and its tensors.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.core.dtypes import DTYPE_OF_CODE, ITEMSIZE
from ckptkit.core.errors import CkptkitError, DamagedError, code_of, memory_for
from ckptkit.core.extents import ByteRange, Reader
from ckptkit.core.json_text import MAX_VALUES, count_values, repeated_keys, require_characters
from ckptkit.core.printable import shortened
from ckptkit.core.specs import MAX_AXES, TensorSpec, long_name
from ckptkit.storage.buffers import bytes_of, elements
from ckptkit.storage.directory import RemoteFile
from ckptkit.storage.links import next_move, why_unreadable
from ckptkit.storage.read import FileExtent, read_new
from ckptkit.storage.regular import open_regular

if TYPE_CHECKING:
    from torch import Tensor

_MAX_BYTES = 1 << 60  # of a tensor; a larger size is a fault
# Hints for dtypes of safetensors that no engine reads.
_UNREAD = {
    "F4": "export pairs of 4-bit numbers as U8, which engines read",
    **dict.fromkeys(
        ("F8_E4M3FNUZ", "F8_E5M2FNUZ"),
        "export the release's FP8, which engines convert: this is FP8 of AMD's MI300, with half the value of F8_E4M3",
    ),
}
_LFS = b"version "  # a pointer of Git LFS begins with this
MAX_HEADER = 100_000_000  # the limit of the safetensors library


@dataclass(frozen=True)
class Fault:
    """A fault of a file, or of the tensor `name`. `hint`: the next step, if not to copy the file again."""

    expected: str
    actual: str
    name: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        return f"{f'{self.name}: ' if self.name else ''}{self.actual} (expected {self.expected})"


@dataclass(frozen=True)
class Shard:
    """The readable part of a file's header: the tensors in the order of their bytes.

    `offsets`: positions of tensors in the file; `nbytes`: bytes of all tensors. `faults`: everything that safetensors
    would reject. `readable`: whether there is a header.
    """

    path: Path
    specs: Mapping[str, TensorSpec] = field(default_factory=dict)
    offsets: Mapping[str, int] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    nbytes: int = 0
    faults: tuple[Fault, ...] = ()
    readable: bool = True
    remote: RemoteFile | None = None

    def sound(self) -> Shard:
        """This shard. Raises CkptkitError for the first of its faults."""
        if self.faults:
            message = f"{self.remote or self.path} is not a valid safetensors file: {self.faults[0]}"
            raise DamagedError(message, self.faults[0].hint or "copy or download it again")
        return self

    def read(self, name: str, reader: Reader | None = None) -> Tensor:
        """Reads one tensor, from loaded ranges of `reader` if possible. Raises DamagedError for a truncated file."""
        spec, flat = self.specs[name], self._bytes(name, reader)
        if len(flat) != spec.nbytes:
            hint = "the file is truncated; copy or download it again"
            raise DamagedError(f"{self.remote or self.path}: {name} ends before its {spec.nbytes} bytes", hint)
        return elements(flat, spec.torch_dtype).view(spec.shape)

    def _bytes(self, name: str, reader: Reader | None) -> Tensor:
        """The bytes of a tensor, uint8 [bytes]; fewer at the end of the file."""
        if self.remote is None:
            # Plain reads, not mmap: a truncated file or a bad sector raises an error instead of a signal.
            loaded = reader.loaded(self.byte_range(name)) if reader else None
            return read_new(self.byte_range(name)) if loaded is None else loaded
        import torch

        flat = torch.empty(self.specs[name].nbytes, dtype=torch.uint8)
        return flat[: self.remote.read_into(bytes_of(flat), self.offsets[name])]

    def stretch(self, name: str, element: int) -> FileExtent:
        """The bytes of a tensor from an element on, counted row by row."""
        before = element * ITEMSIZE[self.specs[name].dtype]
        return FileExtent(self.path, self.offsets[name] + before, self.specs[name].nbytes - before)

    def byte_range(self, name: str) -> ByteRange:
        """The position of a tensor's bytes."""
        return ByteRange(self.path, self.offsets[name], self.offsets[name] + self.specs[name].nbytes)


def read_shard(path: Path, remote: RemoteFile | None = None) -> Shard:
    """The header of a file (the copied one of `remote`). Raises CkptkitError if safetensors would reject it."""
    try:
        with memory_for(remote or path):
            return scan_shard(path, remote).sound()
    except OSError as error:
        hint = next_move(path, "restore this shard, which the index lists")
        raise CkptkitError(f"{remote or path}: {why_unreadable(path, error)}", hint, code=code_of(error)) from error


def scan_shard(path: Path, remote: RemoteFile | None = None) -> Shard:
    """Like `read_shard`, but returns `faults`. Raises OSError if the file cannot be read."""
    size = remote.size if remote else path.stat().st_size
    with open_regular(path) as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if first == _LFS:
            return unreadable(path, "it is a Git LFS pointer: run `git lfs pull`", remote)
        if size < 8 or length > min(size - 8, MAX_HEADER):
            return unreadable(path, f"it has {size} bytes, too few for its header of {length}", remote)
        text = file.read(length)
    try:
        if (values := count_values(text)) > MAX_VALUES:
            return unreadable(path, f"its header has about {values} values, but at most {MAX_VALUES} are read", remote)
        header = json.loads(text.decode())
        require_characters(text, header)
    except (ValueError, RecursionError) as error:
        return unreadable(path, f"its header is not JSON ({error})", remote)
    if not isinstance(header, dict):
        return unreadable(path, "its header is not a JSON object", remote)
    if problem := long_name(header):
        return unreadable(path, problem, remote)
    # More colons than pairs of the parsed values: in names, or of repeated keys.
    pairs = len(header) + sum([len(entry) for entry in header.values() if isinstance(entry, dict)])
    faults = list(_repetitions(text)) if text.count(b":") > pairs else []
    metadata = {} if (stored := header.pop("__metadata__", None)) is None else stored
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        faults.append(Fault("a __metadata__ of strings", shortened(metadata)))
        metadata = {}
    spans = _sound_spans(header)
    if spans is None:
        found = [_entry(name, entry) for name, entry in header.items()]
        spans = [one for one in found if not isinstance(one, Fault)]
        faults += [one for one in found if isinstance(one, Fault)]
    spans.sort(key=itemgetter(0))
    start = 8 + length
    faults += _misplaced(spans, start, size)
    return Shard(
        path,
        {spec.name: spec for _, _, _, spec in spans},
        {spec.name: start + begin for begin, _, _, spec in spans},
        metadata,
        sum([nbytes for _, _, nbytes, _ in spans]),
        tuple(faults),
        remote=remote,
    )


def unreadable(path: Path, actual: str, remote: RemoteFile | None = None) -> Shard:
    """A file without a readable header."""
    return Shard(path, faults=(Fault("a safetensors file", actual),), readable=False, remote=remote)


class _Object(list[tuple[str, Any]]):
    """A JSON object as pairs, with repeated keys."""


def _repetitions(text: bytes) -> Iterator[Fault]:
    """Repeated names in a header, and entries with repeated keys."""
    pairs: _Object = json.loads(text, object_pairs_hook=_Object)
    for name in repeated_keys(pairs):
        yield Fault("each name once in a header", "it occurs twice", name)
    for name, entry in pairs:
        if name != "__metadata__" and isinstance(entry, _Object) and (keys := repeated_keys(entry)):
            yield Fault("each key once in a header's entry", f"its entry has {', '.join(keys)} twice", name)


# First byte and end in the data, bytes of the tensor, and the tensor.
_Span = tuple[int, int, int, TensorSpec]
_SIZE_OF_CODE = {code: ITEMSIZE[dtype] for code, dtype in DTYPE_OF_CODE.items()}


def _sound_spans(header: Mapping[str, Any]) -> list[_Span] | None:
    """Checks and parses all header entries at once. Returns None if one is invalid, and each must be parsed singly."""
    try:
        entries = [(name, entry["dtype"], entry["shape"], *entry["data_offsets"]) for name, entry in header.items()]
        if max((len(entry[2]) for entry in entries), default=0) > MAX_AXES:
            return None
        numbers = [
            *chain.from_iterable(entry[2] for entry in entries),
            *(entry[3] for entry in entries),
            *(entry[4] for entry in entries),
        ]
        spans = [
            (begin, end, math.prod(shape) * _SIZE_OF_CODE[code], TensorSpec(name, tuple(shape), DTYPE_OF_CODE[code]))
            for name, code, shape, begin, end in entries
        ]
    except (TypeError, ValueError, LookupError):
        return None
    shapes_are_lists = all(type(entry[2]) is list for entry in entries)
    sound = shapes_are_lists and {int}.issuperset(map(type, numbers)) and min(numbers, default=0) >= 0
    return spans if sound and max([*numbers, *(span[2] for span in spans)], default=0) < _MAX_BYTES else None


def _entry(name: str, entry: Any) -> _Span | Fault:
    """One header entry, or its fault."""
    expected = "a header entry with a known dtype, whole numbers as shape and two data_offsets"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        return Fault(expected, f"its header entry for {name} is not valid: {shortened(entry)}", name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_OF_CODE:
        actual = f"{name} has dtype {shortened(dtype)}, which ckptkit does not know"
        return Fault(expected, actual, name, _UNREAD.get(str(dtype)))
    for values in (shape, offsets):
        if not isinstance(values, list) or not {int}.issuperset(map(type, values)):
            actual = f"its header entry for {name} has {shortened(values)} instead of whole numbers"
            return Fault(expected, actual, name)
    is_bounded = all(0 <= number < _MAX_BYTES for number in (*shape, *offsets))
    if not is_bounded or len(shape) > MAX_AXES or len(offsets) != 2 or math.prod(shape) >= _MAX_BYTES:
        return Fault(expected, f"its header entry for {name} is not valid: {shortened(entry)}", name)
    spec = TensorSpec(name, tuple(shape), DTYPE_OF_CODE[dtype])
    return offsets[0], offsets[1], spec.nbytes, spec


def _misplaced(spans: Sequence[_Span], start: int, size: int) -> Iterator[Fault]:
    """Faults in the positions of tensors, which are in order: overlaps, holes, a truncated file, trailing bytes."""
    stop = 0
    for begin, end, nbytes, spec in spans:
        if begin == stop and end == begin + nbytes:
            stop = end
            continue
        if end - begin != nbytes:
            yield Fault(f"{nbytes} bytes for {spec}", f"its header entry spans {end - begin} bytes", spec.name)
        if begin != stop:
            kind = "overlaps the tensor before it" if begin < stop else "leaves a hole before it"
            yield Fault(f"data from byte {stop}", f"data from byte {begin}: it {kind}", spec.name)
        stop = max(stop, begin + nbytes)
    if start + stop != size:
        kind = "is truncated" if size < start + stop else "has trailing bytes"
        yield Fault(f"{start + stop} bytes, according to its header", f"{size} bytes: the file {kind}")
