"""Reads HF checkpoints: safetensors shards with an index, or a single file."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.core.errors import CkptkitError, DamagedError, MissingError, code_of, memory_for
from ckptkit.core.extents import ByteRange, Extent, Reader
from ckptkit.core.json_text import MAX_BYTES, MAX_VALUES, parse
from ckptkit.core.printable import shortened
from ckptkit.core.specs import TensorSpec, long_name, summarize
from ckptkit.formats.detect import other_weights, refuse_other_format
from ckptkit.formats.hf.shard import Shard, read_shard
from ckptkit.storage.directory import Directory, directory
from ckptkit.storage.links import next_move, why_unreadable
from ckptkit.storage.read import FileExtent
from ckptkit.storage.regular import read_regular

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Configs are read often. The largest list every unquantized layer: some ten thousand.
_CONFIG, _MAX_IN_CONFIG = "config.json", 250_000
MODELOPT_CONFIG = "hf_quant_config.json"
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_MAX_NAME = 255  # bytes of a file's name, on every file system of Linux


def read_json(path: Path, shown: str | None = None) -> dict[str, Any]:
    """A JSON object. Raises CkptkitError, with `shown` for its path, if the file is missing or contains none."""
    try:
        content = read_regular(path, MAX_BYTES)
    except OSError as error:
        hint = next_move(path, "download the whole directory of the release: config.json, the index and every shard")
        raise CkptkitError(f"{shown or path}: {why_unreadable(path, error)}", hint, code=code_of(error)) from error
    return parse_json(content, shown or str(path))


def read_config(root: Path | Directory) -> dict[str, Any]:
    """The config.json of an HF directory. Raises CkptkitError like `read_json`.

    A quantization declared only in ModelOpt's hf_quant_config.json is added, like in SGLang and vLLM.
    """
    source = directory(root)
    config = read_json(source.path / _CONFIG, source.at(_CONFIG))
    file, parts = source.path / MODELOPT_CONFIG, (config, config.get("text_config"))
    declared = [part.get(key) for part in parts if isinstance(part, dict) for key in QUANTIZATION_KEYS]
    if not os.path.lexists(file) or any(one is not None for one in declared):
        return config
    content = read_json(file, source.at(MODELOPT_CONFIG))
    # ModelOpt writes this key before 1.0; later the object itself, like in config.json.
    inner = content.get("quantization", content if "quant_algo" in content else None)
    if not isinstance(inner, dict):
        raise DamagedError(f"{source.at(MODELOPT_CONFIG)} has no object `quantization`", "restore it from the release")
    if not inner.get("quant_algo"):  # only a key-value cache is quantized
        return config
    return config | {"quantization_config": {"quant_method": "modelopt", **inner}}


def parse_json(text: bytes, shown: str) -> dict[str, Any]:
    """Parses a JSON object. Raises CkptkitError for anything else."""
    try:
        with memory_for(shown):
            content = parse(text, _MAX_IN_CONFIG if shown.endswith(_CONFIG) else MAX_VALUES)
    except ValueError as error:
        raise DamagedError(f"{shown} is not valid JSON: {error}", "restore it from the release") from error
    if not isinstance(content, dict):
        raise DamagedError(f"{shown} does not contain a JSON object", "restore it from the release")
    return content


def is_file_name(name: str) -> bool:
    """Whether this is a valid name of a file in a directory, not a path to another one."""
    plain = Path(name).name == name and name not in {"", ".", ".."} and "\0" not in name
    return plain and len(name.encode(errors="surrogatepass")) <= _MAX_NAME


def shard_names(root: Path | Directory) -> dict[str, str] | None:
    """The index's {tensor: file}, or None without an index. Raises CkptkitError for a file outside `root`."""
    source = directory(root)
    index, shown = source.path / INDEX, source.at(INDEX)
    if not os.path.lexists(index):  # a broken link is an error below
        return None
    weight_map = read_json(index, shown).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise DamagedError(f"{shown} has no weight_map of names to files", "restore it from the release")
    if not weight_map:
        raise DamagedError(f"{shown} has no tensors: its weight_map is empty", "restore it from the release")
    for file in set(weight_map.values()):
        if not is_file_name(file):
            name = next(name for name, home in weight_map.items() if home == file)
            message = f"{shown} puts {name} into {shortened(file)}, which is not a file of this directory"
            raise DamagedError(message, "restore the index from the release")
    if problem := long_name(weight_map):
        raise DamagedError(f"{shown} has {problem}", "restore the index from the release")
    return weight_map


def stored_names(root: Path) -> Collection[str]:
    """Tensor names in the index or single file, if any. Raises CkptkitError like `shard_names` and `read_shard`."""
    if (weight_map := shard_names(root)) is not None:
        return weight_map
    return read_shard(root / SINGLE).specs if (root / SINGLE).exists() else ()


def has_weights(root: Path) -> bool:
    """Whether an HF directory has safetensors weights: an index, or a single file without one."""
    return (root / INDEX).exists() or (root / SINGLE).exists()


class HfCheckpoint:
    """An HF directory. Reads headers except of known `shards`. Raises CkptkitError if they contradict the index."""

    def __init__(self, root: str | Path | Directory, shards: Mapping[str, Shard] | None = None) -> None:
        self.directory = directory(root)
        self.root = self.directory.path
        self.config = read_config(self.directory)
        weight_map = shard_names(self.directory)
        files = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE]
        refuse_other_format(self.root)
        if weight_map is None and not os.path.lexists(self.root / SINGLE):
            hint = other_weights(self.root) or "download the weights as safetensors"
            raise MissingError(f"{self.directory} has neither {INDEX} nor {SINGLE}", hint)
        known = shards or {}
        self.shards = {
            file: known[file].sound()
            if file in known
            else read_shard(self.root / file, self.directory.remote_file(file))
            for file in files
        }
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
            message = f"{index} lists {len(ghosts)} tensor(s) that no shard contains: {summarize(sorted(ghosts))}"
            raise DamagedError(message, "copy the shards again: one is truncated or from another save")
        if extra := actual.keys() - weight_map.keys():
            message = f"{len(extra)} tensor(s) in the shards are not in {index}: {summarize(sorted(extra))}"
            raise DamagedError(message, "restore the index of this save")
        if stored != len(actual):
            hint = "run `ckptkit verify` to list the files of the two mixed saves"
            raise DamagedError(f"{self.directory}: two shards contain the same tensor", hint)
        if moved := [name for name, file in weight_map.items() if actual[name] != file]:
            raise DamagedError(f"{index} names the wrong file for {summarize(moved)}", "restore the index")

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: spec for shard in self.shards.values() for name, spec in shard.specs.items()}

    @property
    def groups(self) -> Sequence[tuple[str, ...]]:
        return [(name,) for name in self.specs]

    @property
    def layout(self) -> dict[str, list[str]]:
        """The tensors of each file, in file order."""
        return {file: list(shard.specs) for file, shard in self.shards.items()}

    def files_of(self, names: Sequence[str]) -> list[str]:
        shards = (self._shard_of[name] for name in names)
        return list(dict.fromkeys(str(shard.remote or shard.path) for shard in shards))

    def byte_ranges(self, names: Iterable[str]) -> Iterator[ByteRange]:
        for name in names:
            shard = self._shard_of[name]
            if shard.remote is None:
                yield shard.byte_range(name)

    def is_streamable(self, name: str) -> bool:
        return self._shard_of[name].remote is None

    def extents(self, name: str) -> Sequence[Extent] | None:
        shard = self._shard_of[name]
        if shard.remote is not None:
            return None
        return [FileExtent(shard.path, shard.offsets[name], shard.specs[name].nbytes)]

    def read(self, names: Sequence[str], reader: Reader | None = None) -> dict[str, Tensor]:
        return {name: self._shard_of[name].read(name, reader) for name in names}
