"""An HF directory as its files tell it, however broken: every fault is kept as data, and nothing here raises for one.

`ckptkit.formats.hf.reader` refuses a broken directory at its first fault. To list all of them, and to know the names
in a truncated shard, the headers are read here a second time, leniently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.hf.reader import (
    BEGIN,
    INDEX,
    MAX_HEADER,
    SINGLE,
    Span,
    may_repeat,
    parse_entry,
    read_json,
    sound_spans,
)
from verify.issue import Issue


class _Object(list[tuple[str, Any]]):
    """A JSON object as pairs, so that a key that is there twice shows."""


@dataclass(frozen=True)
class ShardScan:
    """What one shard's header says, as far as it can be read: tensors in the order of their bytes.

    `nbytes` is the sum of what they take. `readable` is False when no header could be read.
    """

    path: Path
    specs: Mapping[str, TensorSpec] = field(default_factory=dict)
    issues: tuple[Issue, ...] = ()
    readable: bool = True
    nbytes: int = 0


def scan_shard(path: Path) -> ShardScan:
    """Reads a header and compares it with its file: truncated, trailing, overlapping, holes, listed twice."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                return _unreadable(path, f"{size} bytes, too few for a header of {length}")
            text = file.read(length)
        header = json.loads(text)
    except OSError as error:
        return _unreadable(path, str(error.strerror))
    except (ValueError, RecursionError) as error:
        return _unreadable(path, f"a header that is not JSON ({error})")
    if not isinstance(header, dict):
        return _unreadable(path, "a header that is not a JSON object")
    issues = list(_repetitions(text)) if may_repeat(text, header) else []
    about = header.pop("__metadata__", None)
    if about is not None and not (isinstance(about, dict) and all(isinstance(value, str) for value in about.values())):
        issues.append(Issue("a __metadata__ of strings", f"{about!r:.80}"))
    spans = sound_spans(header)
    if spans is None:
        found = [_entry(name, entry) for name, entry in header.items()]
        spans, wrong = [span for span, _ in found if span], [issue for _, issue in found if issue]
        issues += wrong
    spans.sort(key=BEGIN)
    issues += _layout_issues(spans, 8 + length, size)
    return ShardScan(
        path,
        {spec.name: spec for _, _, _, spec in spans},
        tuple(issues),
        nbytes=sum([nbytes for _, _, nbytes, _ in spans]),
    )


def _unreadable(path: Path, actual: str) -> ShardScan:
    return ShardScan(path, {}, (Issue("a safetensors file", actual),), readable=False)


def _repetitions(text: bytes) -> Iterator[Issue]:
    """Names that are there twice in a header, and entries with a key that is."""
    pairs: _Object = json.loads(text, object_pairs_hook=_Object)
    for name in _repeated(pairs):
        yield Issue("each name once in a header", "it is there twice", names=(name,))
    for name, entry in pairs:
        if name != "__metadata__" and isinstance(entry, _Object) and (keys := _repeated(entry)):
            yield Issue("each key once in a header's entry", f"its entry has {', '.join(keys)} twice", names=(name,))


def _repeated(pairs: _Object) -> list[str]:
    seen: set[str] = set()
    return [key for key, _ in pairs if key in seen or seen.add(key)]  # type: ignore[func-returns-value]


def _entry(name: str, entry: Any) -> tuple[Span | None, Issue | None]:
    try:
        return parse_entry(name, entry), None
    except (TypeError, ValueError) as error:
        actual = str(error) if isinstance(error, ValueError) else f"its header entry for {name} is not valid: {entry}"
        return None, Issue(
            "a header entry with a known dtype, whole numbers as shape and two data_offsets", actual, names=(name,)
        )


def _layout_issues(spans: Sequence[Span], start: int, size: int) -> Iterator[Issue]:
    """What is wrong with where tensors lie, which is told of `spans` in order."""
    stop = 0
    for begin, end, nbytes, spec in spans:
        if begin == stop and end == begin + nbytes:
            stop = end
            continue
        if end - begin != nbytes:
            yield Issue(f"{nbytes} bytes for {spec}", f"its entry spans {end - begin}", names=(spec.name,))
        if begin != stop:
            kind = "overlaps the tensor before it" if begin < stop else "leaves a hole before it"
            yield Issue(f"data from byte {stop}", f"data from byte {begin}: it {kind}", names=(spec.name,))
        stop = max(stop, begin + nbytes)
    if start + stop != size:
        kind = "is truncated" if size < start + stop else "has trailing bytes"
        yield Issue(f"{start + stop} bytes, as its header says", f"{size} bytes: the file {kind}")


@dataclass(frozen=True)
class HfFiles:
    """Everything that the files of an HF directory say. `index` maps names to files; None without a usable index."""

    root: Path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """`config.json`. Raises CkptkitError when it is missing or no JSON object."""
        return read_json(self.root / "config.json")

    @cached_property
    def _index(self) -> tuple[Mapping[str, Any], tuple[Issue, ...]]:
        if not (self.root / INDEX).exists():
            return {}, ()
        try:
            return read_json(self.root / INDEX), ()
        except CkptkitError as error:
            return {}, (Issue("a JSON object", error.message),)

    @cached_property
    def index(self) -> Mapping[str, str] | None:
        """The index's names and files, less the entries that are not usable."""
        weight_map = self._index[0].get("weight_map")
        if not isinstance(weight_map, dict):
            return None
        names = {file for file in weight_map.values() if isinstance(file, str)}
        outside = {file for file in names if Path(file).name != file or file == ".."}
        if not outside and {str}.issuperset(map(type, weight_map.values())):
            return weight_map
        return {name: file for name, file in weight_map.items() if isinstance(file, str) and file not in outside}

    @cached_property
    def index_issues(self) -> tuple[Issue, ...]:
        """What is wrong with the index: unreadable, absent, no weight_map, or entries outside the directory."""
        content, issues = self._index
        if issues:
            return issues
        if not (self.root / INDEX).exists():
            shards = [path.name for path in self.present]
            lone = shards == [SINGLE] or SINGLE in shards
            return (
                ()
                if lone
                else (Issue(f"{INDEX}, or a single {SINGLE}", f"neither; {len(shards)} other .safetensors file(s)"),)
            )
        weight_map = content.get("weight_map")
        if not isinstance(weight_map, dict):
            return (Issue("a weight_map of names to files", f"weight_map is {type(weight_map).__name__}"),)
        return tuple(
            Issue("a file of this directory", f"{weight_map[name]!r}", names=(name,))
            for name in weight_map
            if name not in (self.index or {})
        )

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
        found: dict[str, TensorSpec] = {}
        for shard in self.shards.values():
            found.update(shard.specs)
        return found

    @cached_property
    def twice(self) -> Mapping[str, list[str]]:
        """Tensors that stand in several files, with those files."""
        if sum(len(shard.specs) for shard in self.shards.values()) == len(self.specs):
            return {}
        homes: dict[str, list[str]] = {}
        for file, shard in self.shards.items():
            for name in shard.specs:
                homes.setdefault(name, []).append(file)
        return {name: files for name, files in homes.items() if len(files) > 1}
