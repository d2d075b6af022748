"""Reads HF checkpoints: safetensors shards with an index, or a single file.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.core.dtypes import DTYPE_OF_CODE, ITEMSIZE
from ckptkit.core.errors import CkptkitError
from ckptkit.core.extents import ByteRange, Extent, Reader
from ckptkit.core.specs import TensorSpec, summarize
from ckptkit.formats.detect import other_weights
from ckptkit.storage.buffers import bytes_of, elements
from ckptkit.storage.directory import Directory, RemoteFile, directory
from ckptkit.storage.read import FileExtent, read_new

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100_000_000  # the limit of the safetensors library


@dataclass(frozen=True)
class Shard:
    """The validated header of one file: where each tensor's bytes lie, in file order."""

    path: Path
    specs: Mapping[str, TensorSpec]
    offsets: Mapping[str, int]
    metadata: Mapping[str, str]
    remote: RemoteFile | None = None

    def read(self, name: str, reader: Reader | None = None) -> Tensor:
        """One tensor; what `reader` has loaded of it is not read again.

        Uses plain reads, not mmap: a file truncated meanwhile, or a bad sector, raises an error instead of a signal.
        """
        spec, flat = self.specs[name], self._bytes(name, reader)
        if len(flat) != spec.nbytes:
            hint = "the file is truncated; copy or download it again"
            raise CkptkitError(f"{self.remote or self.path}: {name} ends before its {spec.nbytes} bytes", hint)
        return elements(flat, spec.torch_dtype).view(spec.shape)

    def _bytes(self, name: str, reader: Reader | None) -> Tensor:
        """The bytes of a tensor, uint8 [bytes]: fewer where the file ends."""
        if self.remote is None:
            wanted = self.byte_range(name)
            found = reader.loaded(wanted) if reader else None
            return read_new(wanted) if found is None else found
        import torch

        flat = torch.empty(self.specs[name].nbytes, dtype=torch.uint8)
        return flat[: self.remote.read_into(bytes_of(flat), self.offsets[name])]

    def byte_range(self, name: str) -> ByteRange:
        """Where the bytes of a tensor stand."""
        return ByteRange(self.path, self.offsets[name], self.offsets[name] + self.specs[name].nbytes)


def read_shard(path: Path, remote: RemoteFile | None = None) -> Shard:
    """The header of a safetensors file, or of a `remote` one whose first bytes are at `path`.

    Raises CkptkitError for anything that safetensors itself would refuse: truncation, trailing bytes, holes or overlaps
    between tensors, unknown dtypes, sizes that do not fit shapes.
    """
    shown = remote or path
    try:
        size = remote.size if remote else path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise _broken(shown, f"{size} bytes cannot hold a header of {length}")
            header = parse_header(file.read(length))
    except OSError as error:
        raise CkptkitError(f"{shown}: {error.strerror}", "the index names it; is a shard missing?") from error
    except (ValueError, RecursionError) as error:
        raise _broken(shown, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _broken(shown, "its header is not a JSON object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _broken(shown, "its __metadata__ holds something else than strings")
    start = 8 + length
    try:
        spans = sound_spans(header) or [parse_entry(name, entry) for name, entry in header.items()]
    except ValueError as error:
        raise _broken(shown, str(error)) from error
    spans.sort(key=BEGIN)
    end = 0
    for begin, stop, nbytes, spec in spans:
        if begin != end:
            raise _broken(
                shown, f"{spec.name} starts at byte {begin} of the data, but the tensor before it ends at {end}"
            )
        if stop - begin != nbytes:
            raise _broken(shown, f"{spec} takes {nbytes} bytes, but its entry spans {stop - begin}")
        end = stop
    if start + end != size:
        raise _broken(shown, f"the header promises {start + end} bytes, the file has {size}")
    offsets = {spec.name: start + begin for begin, _, _, spec in spans}
    return Shard(path, {spec.name: spec for _, _, _, spec in spans}, offsets, metadata, remote)


def parse_header(text: bytes) -> Any:
    """The JSON of a header. Raises ValueError where it is none, and where an object has a key twice."""
    header = json.loads(text)
    return json.loads(text, object_pairs_hook=_unique) if may_repeat(text, header) else header


def may_repeat(text: bytes, header: Any) -> bool:
    """Whether the JSON `text` of `header` may have a key twice, which is slower to tell.

    Every pair has a colon. More of them stand in a name, or in a pair whose key came again.
    """
    if not isinstance(header, dict):
        return True
    return text.count(b":") > len(header) + sum([len(entry) for entry in header.values() if isinstance(entry, dict)])


# First byte and end in the data, the bytes that the tensor takes, and the tensor.
Span = tuple[int, int, int, TensorSpec]
BEGIN = itemgetter(0)
_SIZE_OF_CODE = {code: ITEMSIZE[dtype] for code, dtype in DTYPE_OF_CODE.items()}


def sound_spans(header: Mapping[str, Any]) -> list[Span] | None:
    """Checks and parses all header entries at once; None when one is invalid and each must be parsed by itself."""
    try:
        entries = [(name, entry["dtype"], entry["shape"], *entry["data_offsets"]) for name, entry in header.items()]
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
    shapes_are_lists = {list}.issuperset({type(entry[2]) for entry in entries})
    return spans if shapes_are_lists and {int}.issuperset(map(type, numbers)) and min(numbers, default=0) >= 0 else None


def parse_entry(name: str, entry: Any) -> Span:
    """One header entry. Raises ValueError, saying why, for what safetensors does not allow."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"its header entry for {name} is not valid: {entry}")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPE_OF_CODE:
        raise ValueError(f"{name} has dtype {entry['dtype']}, which ckptkit does not know")
    numbers = [*_integers(name, entry["shape"]), *_integers(name, entry["data_offsets"])]
    if len(entry["data_offsets"]) != 2 or min(numbers) < 0:
        raise ValueError(f"its header entry for {name} is not valid: {entry}")
    *shape, begin, end = numbers
    spec = TensorSpec(name, tuple(shape), DTYPE_OF_CODE[entry["dtype"]])
    return begin, end, spec.nbytes, spec


def _integers(name: str, values: Any) -> list[int]:
    if not isinstance(values, list) or not {int}.issuperset(map(type, values)):
        raise ValueError(f"its header entry for {name} has {values} where whole numbers must be")
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError when a key is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _broken(path: Path | RemoteFile, what: str) -> CkptkitError:
    return CkptkitError(f"{path} is not a whole safetensors file: {what}", "copy or download it again")


def read_json(path: Path, shown: str | None = None) -> dict[str, Any]:
    """A JSON object. Raises CkptkitError, with `shown` for its path, when the file is missing or is not one."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CkptkitError(f"{shown or path}: {error.strerror}", "an HF checkpoint directory needs it") from error
    return parse_json(content, shown or str(path))


def parse_json(text: bytes, shown: str) -> dict[str, Any]:
    """A JSON object. Raises CkptkitError when it is none."""
    try:
        content = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise CkptkitError(f"{shown} is not valid JSON: {error}", "restore it from the release") from error
    if not isinstance(content, dict):
        raise CkptkitError(f"{shown} does not hold a JSON object", "restore it from the release")
    return content


def shard_names(root: Path | Directory) -> dict[str, str] | None:
    """The index's {tensor: file}; None without an index. Raises CkptkitError when a file lies outside `root`."""
    source = directory(root)
    index, shown = source.path / INDEX, source.at(INDEX)
    if not index.exists():
        return None
    weight_map = read_json(index, shown).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CkptkitError(f"{shown} has no weight_map of names to files", "restore it from the release")
    for file in set(weight_map.values()):
        if Path(file).name != file or file in {"", ".", ".."}:
            name = next(name for name, home in weight_map.items() if home == file)
            raise CkptkitError(
                f"{shown} puts {name} into {file!r}, which is not a file of this directory",
                "restore the index from the release",
            )
    return weight_map


def stored_names(root: Path) -> Collection[str]:
    """Tensor names in the index or single file of an HF directory; empty without either.

    Raises CkptkitError as `shard_names` and `read_shard`.
    """
    if (weight_map := shard_names(root)) is not None:
        return weight_map
    return read_shard(root / SINGLE).specs if (root / SINGLE).exists() else ()


def has_weights(root: Path) -> bool:
    """Whether this HF directory holds safetensors weights: an index, or the single file that needs none."""
    return (root / INDEX).exists() or (root / SINGLE).exists()


class HfCheckpoint:
    """An HF directory. Opening reads headers only, and raises CkptkitError unless index and shards agree exactly."""

    def __init__(self, root: str | Path | Directory) -> None:
        self.directory = directory(root)
        self.root = self.directory.path
        self.config = read_json(self.root / "config.json", self.directory.at("config.json"))
        weight_map = shard_names(self.directory)
        files = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE]
        if weight_map is None and not (self.root / SINGLE).exists():
            raise CkptkitError(
                f"{self.directory} has neither {INDEX} nor {SINGLE}",
                other_weights(self.root) or "download its weights, as safetensors",
            )
        self.shards = {file: read_shard(self.root / file, self.directory.remote_file(file)) for file in files}
        self._shard_of = {name: shard for shard in self.shards.values() for name in shard.specs}
        if weight_map is not None:
            self._compare_with_index(weight_map)

    def _compare_with_index(self, weight_map: Mapping[str, str]) -> None:
        index = self.directory.at(INDEX)
        actual = {name: file for file, shard in self.shards.items() for name in shard.specs}
        stored = sum(len(shard.specs) for shard in self.shards.values())
        if actual == weight_map and stored == len(actual):
            return
        if ghosts := weight_map.keys() - actual.keys():
            raise CkptkitError(
                f"{index} lists {len(ghosts)} tensor(s) that no shard holds: {summarize(sorted(ghosts))}",
                "a shard is wrong",
            )
        if extra := actual.keys() - weight_map.keys():
            raise CkptkitError(
                f"{len(extra)} tensor(s) in the shards are not in {index}: {summarize(sorted(extra))}",
                "the index is wrong",
            )
        if stored != len(actual):
            raise CkptkitError(
                f"{self.directory}: a tensor stands in two shards", "remove leftovers of an earlier save"
            )
        if moved := [name for name, file in weight_map.items() if actual[name] != file]:
            raise CkptkitError(f"{index} names the wrong file for {summarize(moved)}", "the index is wrong")

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: spec for shard in self.shards.values() for name, spec in shard.specs.items()}

    @property
    def groups(self) -> Sequence[tuple[str, ...]]:
        return [(name,) for name in self.specs]

    @property
    def layout(self) -> dict[str, list[str]]:
        """Which tensors stand in which file, in file order: what a writer needs to cut shards the same way."""
        return {file: list(shard.specs) for file, shard in self.shards.items()}

    def byte_ranges(self, names: Iterable[str]) -> Iterator[ByteRange]:
        """What is read of a local disk to make these tensors."""
        for name in names:
            shard = self._shard_of[name]
            if shard.remote is None:
                yield shard.byte_range(name)

    def is_streamable(self, name: str) -> bool:
        """Whether its bytes are on a local disk: there they are in order."""
        return self._shard_of[name].remote is None

    def extents(self, name: str) -> Sequence[Extent] | None:
        """Where its bytes stand, on a local disk."""
        shard = self._shard_of[name]
        if shard.remote is not None:
            return None
        return [FileExtent(shard.path, shard.offsets[name], shard.specs[name].nbytes)]

    def read(self, names: Sequence[str], reader: Reader | None = None) -> dict[str, Tensor]:
        return {name: self._shard_of[name].read(name, reader) for name in names}
