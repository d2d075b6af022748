"""Reads the files of a directory, however broken: of HF every fault becomes data; Megatron's torch_dist in part.

`ckptkit.formats.hf.reader` refuses a broken directory at its first fault; here all of them are listed, and the names
in a truncated shard are known. No weight is read.
"""

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
    """Everything that the files of an HF directory say. `index` maps names to files; None without a usable index."""

    root: Path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """`config.json`. Raises CkptkitError when it is missing or no JSON object."""
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
        """The index's names and files, less the entries that are not usable."""
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
        """What is wrong with the index: unreadable, absent, no weight_map, or entries outside the directory.

        Links that lead nowhere are in `dangling`.
        """
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
            instead = f"not there, nor {SINGLE}; {len(shards)} other .safetensors file(s)"
            instead = instead if shards else f"no weights: only {', '.join(inside[:5])}{more}"
            return (Issue(f"{INDEX}, or a single {SINGLE}", instead),)
        weight_map = content.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            actual = "an empty one" if weight_map == {} else f"weight_map is {type(weight_map).__name__}"
            return (Issue("a weight_map of names to files", actual),)
        return tuple(
            Issue("a file of this directory", shortened(weight_map[name]), names=(name,))
            for name in weight_map
            if name not in (self.index or {})
        )

    @cached_property
    def total_size(self) -> Any:
        """The index's `metadata.total_size`; None where it says none."""
        metadata = self._index[0].get("metadata")
        return metadata.get("total_size") if isinstance(metadata, dict) else None

    @cached_property
    def dangling(self) -> Mapping[str, str]:
        """Links of the directory that lead nowhere, with their targets."""
        return dangling_in(self.root)

    @cached_property
    def present(self) -> tuple[Path, ...]:
        """Every .safetensors file that is there."""
        return tuple(sorted(self.root.glob("*.safetensors")))

    @cached_property
    def loader_files(self) -> tuple[str, ...]:
        """The files that a loader opens: those of the index, or the single one, or (with no usable index) all."""
        if self.index is not None:
            return tuple(sorted(set(self.index.values())))
        return (SINGLE,) if (self.root / SINGLE).exists() else tuple(path.name for path in self.present)

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Files that a loader would open and that are not there, or links that lead nowhere."""
        return tuple(file for file in self.loader_files if not (self.root / file).exists())

    @cached_property
    def orphans(self) -> tuple[str, ...]:
        """Weight files that nothing refers to."""
        return tuple(path.name for path in self.present if path.name not in self.loader_files)

    @cached_property
    def shards(self) -> Mapping[str, Shard]:
        """The headers of the files that a loader opens and that are there."""
        return {file: self.scan(file) for file in self.loader_files if file not in self.missing}

    def scan(self, file: str) -> Shard:
        """The header of any file of the directory, such as one that the index does not name."""
        try:
            return scan_shard(self.root / file)
        except OSError as error:
            return unreadable(self.root / file, str(error.strerror))

    @cached_property
    def checkpoint(self) -> HfCheckpoint:
        """The same directory, to be read. Raises CkptkitError unless it is sound."""
        return HfCheckpoint(self.root, self.shards)

    @cached_property
    def unknown(self) -> frozenset[str]:
        """Names that the index puts into files whose header cannot be read: they may well be there."""
        closed = {file for file in self.loader_files if file in self.missing or not self.shards[file].readable}
        return frozenset(name for name, file in (self.index or {}).items() if file in closed)

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor of every readable header."""
        found: dict[str, TensorSpec] = {}
        for shard in self.shards.values():
            found.update(shard.specs)
        return found

    def stretch(self, name: str, element: int) -> FileExtent | None:
        """The bytes of a tensor from an element on; None where no readable header has it."""
        named = self.shards.get((self.index or {}).get(name, ""))  # the one that the index names first
        likely = (*filter(None, [named]), *self.shards.values())
        shard = next((one for one in likely if name in one.specs), None)
        return None if shard is None else shard.stretch(name, element)

    @cached_property
    def duplicates(self) -> Mapping[str, list[str]]:
        """Tensors that stand in several files, with those files."""
        if sum(len(shard.specs) for shard in self.shards.values()) == len(self.specs):
            return {}
        homes = by_key((name, file) for file, shard in self.shards.items() for name in shard.specs)
        return {name: files for name, files in homes.items() if len(files) > 1}


class LenientTorchDist(TorchDistCheckpoint):
    """Names and shapes of the global tensors in `.metadata`, opened even where chunks do not tile."""

    def __init__(self, path: Path, metadata: StoredMetadata, hf: Path | None) -> None:
        self.path = path
        self.hf = Directory(hf if hf else path.parent / "hf")
        self.metadata = metadata
        self._logical = dict(self._name_all())


@dataclass(frozen=True)
class MegatronFiles:
    """Everything that the files of a Megatron directory say."""

    root: Path  # what the user gave: the directory with the tracker, or one iteration
    hf: Path | None

    @cached_property
    def weights(self) -> Path:
        """The directory with the weights. Raises CkptkitError when the tracker names none that exists."""
        return iteration_of(self.root)

    @cached_property
    def metadata(self) -> StoredMetadata:
        """What `.metadata` says. Raises CkptkitError when it cannot be read."""
        return read_metadata(self.weights)

    @cached_property
    def opened(self) -> LenientTorchDist:
        """Names and shapes of the global tensors.

        Raises CkptkitError when `.metadata` cannot be read, UnsupportedError where it is not of torch_dist.
        """
        refuse_plain_dcp(self.weights, self.metadata.keys, self.metadata.by_torch)
        return LenientTorchDist(self.weights, self.metadata, self.hf)

    @cached_property
    def hybrid(self) -> bool:
        """Whether the tensors are those of a HybridModel. Raises as `opened`."""
        return is_hybrid(self.opened.specs)

    @cached_property
    def readable(self) -> bool:
        """Whether `.metadata` can be read at all; CK111 says why when it cannot.

        Raises UnsupportedError for a distributed checkpoint in another format.
        """
        try:
            self.opened  # noqa: B018 - a cached property that raises
        except UnsupportedError:
            raise
        except CkptkitError:
            return False
        return True

    @cached_property
    def args(self) -> Mapping[str, Any]:
        """The stored training arguments, of Megatron-LM or as a run's YAML comes to; empty when there are none.

        Raises CkptkitError when they cannot be read.
        """
        args = self.opened.common.get("args")
        if args is None:
            return stored_args(self.weights, {})
        if not hasattr(args, "__dict__"):
            raise CkptkitError(
                f"{self.weights}: the stored training arguments are {type(args).__name__}, not a namespace",
                "convert it again",
            )
        return dict(vars(args))

    @property
    def args_file(self) -> Path:
        """The file that the training arguments stand in. Raises as `opened`."""
        return args_file(self.weights, self.opened.common.get("args") is not None)

    @cached_property
    def blobs(self) -> Mapping[Path, Mapping[tuple[int, int], tuple[str, ...]]]:
        """For every file, the (offset, length) ranges that keys are stored in, in file order; aliases share a range."""
        found: dict[Path, dict[tuple[int, int], list[str]]] = defaultdict(lambda: defaultdict(list))
        stored = [(key, chunk.blob) for key, tensor in self.metadata.tensors.items() for chunk in tensor.chunks]
        for key, blob in (*stored, *self.metadata.objects.items()):
            found[blob.path][blob.offset, blob.length].append(key)
        return {
            path: {at: tuple(keys) for at, keys in sorted(ranges.items())} for path, ranges in sorted(found.items())
        }
