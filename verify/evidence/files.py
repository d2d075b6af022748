"""Reads headers and metadata of broken checkpoints: lists all faults that `ckptkit.formats.hf.reader` stops at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ckptkit.converters.megatron.hybrid_model import is_hybrid
from ckptkit.converters.megatron.run_config import args_file, stored_args
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.core.printable import shortened
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.detect import iteration_of
from ckptkit.formats.hf.reader import INDEX, SINGLE, HfCheckpoint, is_file_name, read_config, read_json
from ckptkit.formats.hf.shard import Shard, scan_shard, unreadable
from ckptkit.formats.torch_dist.plain_dcp import refuse_plain_dcp
from ckptkit.formats.torch_dist.reader import StoredMetadata, TorchDistCheckpoint, read_metadata
from ckptkit.storage.directory import Directory
from ckptkit.storage.links import dangling_in
from ckptkit.storage.read import FileExtent
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.evidence.folding import by_key


@dataclass(frozen=True)
class HfFiles:
    """The files of an HF directory."""

    root: Path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """`config.json`. Raises CkptkitError if it is missing or not a JSON object."""
        return read_config(self.root)

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
        """The file of each name by the index's usable entries, or None without a usable index."""
        weight_map = self._index[0].get("weight_map")
        if not isinstance(weight_map, dict):
            return None
        names = {file for file in weight_map.values() if isinstance(file, str)}
        outside = {file for file in names if not is_file_name(file)}
        if not outside and {str}.issuperset(map(type, weight_map.values())):
            return weight_map
        return {name: file for name, file in weight_map.items() if isinstance(file, str) and file not in outside}

    @cached_property
    def index_issues(self) -> tuple[Issue, ...]:
        """Faults of the index: unreadable, absent, no weight_map, or entries outside the directory."""
        if INDEX in self.dangling:
            return ()
        content, issues = self._index
        if issues:
            return issues
        if not (self.root / INDEX).exists():
            shards = [path.name for path in self.present]
            if SINGLE in shards:
                return ()
            inside = sorted(path.name for path in self.root.iterdir() if path.is_file())
            more = f" and {len(inside) - 5} more" if inside[5:] else ""
            actual = f"neither of the two, but other .safetensors files: {len(shards)}"
            actual = actual if shards else f"no weights: only {', '.join(inside[:5])}{more}"
            return (Issue(f"{INDEX}, or a single {SINGLE}", actual),)
        weight_map = content.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            actual = "weight_map is empty" if weight_map == {} else f"weight_map is {type(weight_map).__name__}"
            return (Issue("a weight_map of names to files", actual),)
        outside = (name for name in weight_map if name not in (self.index or {}))
        return tuple(Issue("a file of this directory", shortened(weight_map[one]), names=(one,)) for one in outside)

    @cached_property
    def total_size(self) -> Any:
        """The index's `metadata.total_size`, or None."""
        metadata = self._index[0].get("metadata")
        return metadata.get("total_size") if isinstance(metadata, dict) else None

    @cached_property
    def dangling(self) -> Mapping[str, str]:
        """Dangling links of the directory, with their targets."""
        return dangling_in(self.root)

    @cached_property
    def present(self) -> tuple[Path, ...]:
        """Every .safetensors file of the directory."""
        return tuple(sorted(self.root.glob("*.safetensors")))

    @cached_property
    def loader_files(self) -> tuple[str, ...]:
        """The files that a loader opens: those of the index, else the single one, else all."""
        if self.index is not None:
            return tuple(sorted(set(self.index.values())))
        return (SINGLE,) if (self.root / SINGLE).exists() else tuple(path.name for path in self.present)

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Files that a loader opens and that are missing or dangling links."""
        return tuple(file for file in self.loader_files if not (self.root / file).exists())

    @cached_property
    def orphans(self) -> tuple[str, ...]:
        """Weight files that no loader opens."""
        return tuple(path.name for path in self.present if path.name not in self.loader_files)

    @cached_property
    def shards(self) -> Mapping[str, Shard]:
        """The headers of the existing files that a loader opens."""
        return {file: self.scan(file) for file in self.loader_files if file not in self.missing}

    def scan(self, file: str) -> Shard:
        """The header of any file of the directory."""
        try:
            return scan_shard(self.root / file)
        except OSError as error:
            return unreadable(self.root / file, str(error.strerror))

    @cached_property
    def checkpoint(self) -> HfCheckpoint:
        """The directory opened for reading. Raises CkptkitError unless it is sound."""
        return HfCheckpoint(self.root, self.shards)

    @cached_property
    def unknown(self) -> frozenset[str]:
        """Names that the index puts into missing files or files with an unreadable header."""
        closed = {file for file in self.loader_files if file in self.missing or not self.shards[file].readable}
        return frozenset(name for name, file in (self.index or {}).items() if file in closed)

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor of every readable header."""
        return {name: spec for shard in self.shards.values() for name, spec in shard.specs.items()}

    def stretch(self, name: str, element: int) -> FileExtent | None:
        """The bytes of a tensor from an element on, or None if no readable header has it."""
        shards = (*filter(None, [self.shards.get((self.index or {}).get(name, ""))]), *self.shards.values())
        return next((shard.stretch(name, element) for shard in shards if name in shard.specs), None)

    @cached_property
    def duplicates(self) -> Mapping[str, list[str]]:
        """Tensors that are in several files, with those files."""
        if sum(len(shard.specs) for shard in self.shards.values()) == len(self.specs):
            return {}
        homes = by_key((name, file) for file, shard in self.shards.items() for name in shard.specs)
        return {name: files for name, files in homes.items() if len(files) > 1}


class LenientTorchDist(TorchDistCheckpoint):
    """Names and shapes of the global tensors in `.metadata`, even if chunks do not tile."""

    def __init__(self, path: Path, metadata: StoredMetadata, hf: Path | None) -> None:
        self.path = path
        self.hf = Directory(hf if hf else path.parent / "hf")
        self.metadata = metadata
        self._logical = dict(self._name_all())


@dataclass(frozen=True)
class MegatronFiles:
    """The files of a Megatron directory."""

    root: Path  # as the user gave it: the directory with the tracker, or one iteration
    hf: Path | None

    @cached_property
    def weights(self) -> Path:
        """The directory with the weights. Raises CkptkitError if the tracker names none that exists."""
        return iteration_of(self.root)

    @cached_property
    def metadata(self) -> StoredMetadata:
        """The contents of `.metadata`. Raises CkptkitError if it cannot be read."""
        return read_metadata(self.weights)

    @cached_property
    def opened(self) -> LenientTorchDist:
        """The global tensors. Raises as `metadata`, and UnsupportedError if the format is not torch_dist."""
        refuse_plain_dcp(self.weights, self.metadata.keys, self.metadata.by_torch)
        return LenientTorchDist(self.weights, self.metadata, self.hf)

    @cached_property
    def hybrid(self) -> bool:
        """Whether the model is a HybridModel. Raises as `opened`."""
        return is_hybrid(self.opened.specs)

    @cached_property
    def readable(self) -> bool:
        """Whether `.metadata` can be read; else CK111 reports it. Raises UnsupportedError for another format."""
        try:
            self.opened  # noqa: B018 - a cached property that raises
        except UnsupportedError:
            raise
        except CkptkitError:
            return False
        return True

    @cached_property
    def args(self) -> Mapping[str, Any]:
        """Training arguments, of Megatron-LM or of a run's YAML; may be empty. Raises CkptkitError if unreadable."""
        args = self.opened.common.get("args")
        if args is None:
            return stored_args(self.weights, {})
        if not hasattr(args, "__dict__"):
            message = f"{self.weights}: the stored training arguments are {type(args).__name__}, not a namespace"
            raise CkptkitError(message, "convert it again")
        return dict(vars(args))

    @property
    def args_file(self) -> Path:
        """The file with the training arguments. Raises as `opened`."""
        return args_file(self.weights, self.opened.common.get("args") is not None)

    @cached_property
    def blobs(self) -> Mapping[Path, Mapping[tuple[int, int], tuple[str, ...]]]:
        """For every file, the keys of each range (offset, length), in file order; aliases share a range."""
        found: dict[Path, dict[tuple[int, int], list[str]]] = defaultdict(lambda: defaultdict(list))
        stored = [(key, chunk.blob) for key, tensor in self.metadata.tensors.items() for chunk in tensor.chunks]
        for key, blob in (*stored, *self.metadata.objects.items()):
            found[blob.path][blob.offset, blob.length].append(key)
        files = sorted(found.items())
        return {path: {at: tuple(keys) for at, keys in sorted(ranges.items())} for path, ranges in files}
