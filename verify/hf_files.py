"""An HF directory as its files tell it, however broken: every fault is kept as data, and nothing here raises for one.

`ckptkit.safetensors_io` refuses a broken directory at its first fault. To list all of them, and to still know the names
in a truncated shard, the headers are read here a second time, leniently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ckptkit.errors import CkptkitError
from ckptkit.safetensors_io import INDEX, MAX_HEADER, SINGLE, parse_entry, read_json
from ckptkit.specs import TensorSpec


@dataclass(frozen=True)
class Fault:
    """Something wrong with a file: what should be, what is, and the tensor concerned where there is one."""

    expected: str
    actual: str
    tensor: str | None = None


class _Object(list[tuple[str, Any]]):
    """A JSON object as pairs, so that a key that is there twice shows."""


@dataclass(frozen=True)
class ShardScan:
    """What one shard's header says, as far as it can be read. `readable` is False when no header could be."""

    path: Path
    specs: Mapping[str, TensorSpec] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    readable: bool = True


def scan_shard(path: Path) -> ShardScan:
    """Reads a header and compares it with the size of its file: truncated, trailing, overlapping, holes, listed twice."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                return _unreadable(path, f"{size} bytes, too few for a header of {length}")
            pairs = json.loads(file.read(length), object_pairs_hook=_Object)
    except OSError as error:
        return _unreadable(path, str(error.strerror))
    except (ValueError, RecursionError) as error:
        return _unreadable(path, f"a header that is not JSON ({error})")
    if not isinstance(pairs, _Object):
        return _unreadable(path, "a header that is not a JSON object")
    entries = [(name, entry) for name, entry in pairs if name != "__metadata__"]
    faults = [Fault("each name once in a header", "it is there twice", name) for name in _repeated([name for name, _ in pairs])]
    faults += [Fault("a __metadata__ of strings", f"{about!r:.80}") for name, about in pairs if name == "__metadata__" and not _is_metadata(about)]
    spans: list[tuple[int, TensorSpec]] = []
    for name, entry in dict(entries).items():
        span, fault = _entry(name, entry)
        spans += [span] if span else []
        faults += [fault] if fault else []
    faults += _layout_faults(spans, 8 + length, size)
    return ShardScan(path, {spec.name: spec for _, spec in sorted(spans, key=lambda span: span[0])}, tuple(faults))


def _unreadable(path: Path, actual: str) -> ShardScan:
    return ShardScan(path, {}, (Fault("a safetensors file", actual),), readable=False)


def _repeated(names: list[str]) -> list[str]:
    if len(set(names)) == len(names):
        return []
    seen: set[str] = set()
    return [name for name in names if name in seen or seen.add(name)]  # type: ignore[func-returns-value]


def _is_metadata(content: Any) -> bool:
    return content is None or (isinstance(content, _Object) and all(isinstance(text, str) for _, text in content))


def _entry(name: str, entry: Any) -> tuple[tuple[int, TensorSpec] | None, Fault | None]:
    try:
        spec, begin, end = parse_entry(name, _plain(entry))
    except (TypeError, ValueError) as error:
        actual = str(error) if isinstance(error, ValueError) else f"its header entry for {name} is not valid: {entry}"
        return None, Fault("a header entry with a known dtype, whole numbers as shape and two data_offsets", actual, name)
    fault = Fault(f"{spec.nbytes} bytes for {spec}", f"its entry spans {end - begin}", name) if end - begin != spec.nbytes else None
    return (begin, spec), fault


def _plain(value: Any) -> Any:
    """Objects as dicts again. Raises ValueError for a key that is there twice."""
    if not isinstance(value, _Object):
        return value
    plain = dict(value)
    if len(plain) < len(value):
        repeated = _repeated([key for key, _ in value])
        raise ValueError(f"its entry has {', '.join(repeated)} twice")
    return plain


def _layout_faults(spans: list[tuple[int, TensorSpec]], start: int, size: int) -> list[Fault]:
    faults = []
    end = 0
    for begin, spec in sorted(spans, key=lambda span: span[0]):
        if begin != end:
            kind = "overlaps the tensor before it" if begin < end else "leaves a hole before it"
            faults.append(Fault(f"data from byte {end}", f"data from byte {begin}: it {kind}", spec.name))
        end = max(end, begin + spec.nbytes)
    if start + end != size:
        kind = "truncated" if size < start + end else "has trailing bytes"
        faults.append(Fault(f"{start + end} bytes, as its header says", f"{size} bytes: the file {kind if kind != 'truncated' else 'is truncated'}"))
    return faults


@dataclass(frozen=True)
class HfFiles:
    """Everything that the files of an HF directory say. `index` maps names to file names; None where there is no usable index."""

    root: Path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """`config.json`. Raises CkptkitError when it is missing or no JSON object."""
        return read_json(self.root / "config.json")

    @cached_property
    def _index(self) -> tuple[Mapping[str, Any], tuple[Fault, ...]]:
        if not (self.root / INDEX).exists():
            return {}, ()
        try:
            return read_json(self.root / INDEX), ()
        except CkptkitError as error:
            return {}, (Fault("a JSON object", error.message),)

    @cached_property
    def index(self) -> Mapping[str, str] | None:
        """The index's names and files, less the entries that are not usable."""
        weight_map = self._index[0].get("weight_map")
        if not isinstance(weight_map, dict):
            return None
        return {name: file for name, file in weight_map.items() if _inside(file)}

    @cached_property
    def index_faults(self) -> tuple[Fault, ...]:
        """What is wrong with the index itself: unreadable, no weight_map, entries outside the directory, or not there at all."""
        content, faults = self._index
        if faults:
            return faults
        if not (self.root / INDEX).exists():
            shards = [path.name for path in self.present]
            lone = shards == [SINGLE] or SINGLE in shards
            return () if lone else (Fault(f"{INDEX}, or a single {SINGLE}", f"neither; {len(shards)} other .safetensors file(s)"),)
        weight_map = content.get("weight_map")
        if not isinstance(weight_map, dict):
            return (Fault("a weight_map of names to files", f"weight_map is {type(weight_map).__name__}"),)
        return tuple(Fault("a file of this directory", f"{file!r}", name) for name, file in weight_map.items() if not _inside(file))

    @cached_property
    def total_size(self) -> Any:
        """The index's `metadata.total_size`; None where it says none."""
        metadata = self._index[0].get("metadata")
        return metadata.get("total_size") if isinstance(metadata, dict) else None

    @cached_property
    def present(self) -> tuple[Path, ...]:
        """Every .safetensors file that is there."""
        return tuple(sorted(self.root.glob("*.safetensors")))

    @cached_property
    def wanted(self) -> tuple[str, ...]:
        """The files that a loader opens: those of the index, or the single one, or (with no usable index) all."""
        if self.index is not None:
            return tuple(sorted(set(self.index.values())))
        return (SINGLE,) if (self.root / SINGLE).exists() else tuple(path.name for path in self.present)

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Files that the index names and that are not there."""
        return tuple(file for file in self.wanted if not (self.root / file).exists())

    @cached_property
    def orphans(self) -> tuple[str, ...]:
        """Weight files that nothing refers to."""
        return tuple(path.name for path in self.present if path.name not in self.wanted)

    @cached_property
    def shards(self) -> Mapping[str, ShardScan]:
        """The headers of the files that a loader opens and that are there."""
        return {file: scan_shard(self.root / file) for file in self.wanted if file not in self.missing}

    def scan(self, file: str) -> ShardScan:
        """The header of any file of the directory, such as one that the index does not name."""
        return scan_shard(self.root / file)

    @cached_property
    def unknown(self) -> frozenset[str]:
        """Names that the index puts into files whose header cannot be read: they may well be there."""
        closed = {file for file in self.wanted if file in self.missing or not self.shards[file].readable}
        return frozenset(name for name, file in (self.index or {}).items() if file in closed)

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor of every readable header."""
        return {name: spec for shard in self.shards.values() for name, spec in shard.specs.items()}


def _inside(file: object) -> bool:
    # As Path(file).name == file, which takes seconds for the names of a large index.
    return isinstance(file, str) and "/" not in file and file not in {"", ".", ".."}
