"""Checks what `--overwrite` may remove: one checkpoint, in a directory without other files."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import summarize
from ckptkit.formats.detect import ITERATION, LEGACY_FILE, LEGACY_RANK, LOADED, MANIFEST, TRACKER
from ckptkit.formats.hf.reader import INDEX, read_json
from ckptkit.formats.hf.shard import scan_shard
from ckptkit.formats.torch_dist.reader import read_metadata
from ckptkit.formats.torch_save.saved_file import SavedFile, require_saved
from ckptkit.storage.regular import kind_of, open_regular
from ckptkit.storage.tree import mounts_at, walk_tree
from ckptkit.transfer.journal import Journal, is_of_journal
from ckptkit.transfer.manifest import SCHEMAS, file_digest

_DOCUMENT = r"README\.md|USE_POLICY\.md|(LICEN[CS]E|NOTICE)(\.txt|\.md)?"
# Code of a model, by transformers' names.
_CODE = (
    r"(modeling|modular|configuration|tokenization|processing|image_processing|video_processing|feature_extraction)_"
    r"\w+\.py"
)
_SIDE = "|".join(map(re.escape, sorted(LOADED))) + (
    rf"|[^/]*\.(jinja|model|tiktoken|spm)|additional_chat_templates/([^/]*\.jinja)?|\.gitattributes|{_DOCUMENT}|{_CODE}"
)
_WEIGHTS = (
    r"(model|consolidated|adapter_model)([.-][^/]*)?\.safetensors(\.index\.json)?"
    r"|(pytorch|adapter)_model[^/]*\.bin(\.index\.json)?|consolidated[^/]*\.pth|[^/]*\.gguf"
)
_CARRIED = "carried/"  # passthrough tensors: `ckptkit.converters.passthrough.FOLDER`
_CARRIED_WEIGHTS = r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
_OURS = r"ckptkit\.json(\.sig)?|config\.json\.orig"
# Metadata of huggingface_hub's downloads. Source: its `_local_folder.py`.
_DOWNLOAD = (
    r"\.cache/huggingface/(\.gitignore(\.lock)?|CACHEDIR\.TAG|(down|up)load/(.*(/|\.metadata|\.lock|\.incomplete))?)"
)
# The files of a checkpoint of each kind, and its empty folders, with a trailing `/`.
_OF_HF = re.compile(rf"{_SIDE}|{_WEIGHTS}|{_OURS}|{_DOWNLOAD}")
_OF_MEGATRON = re.compile(
    rf"{re.escape(TRACKER)}|{_OURS}|hf/({_SIDE})?|{_CARRIED}(config\.json|{_CARRIED_WEIGHTS})?"
    r"|(release/)?(\.metadata|metadata\.json|common\.pt|run_config\.yaml|train_state\.pt|__\d+_\d+\.distcp)?"
    rf"|(release/)?{LEGACY_RANK.pattern}/({re.escape(LEGACY_FILE)})?"
)
# Files that may be a user's own work, unless a manifest lists them with the same digest.
_AS_LISTED = re.compile(rf"(hf/)?({_DOCUMENT}|{_CODE})")
_METADATA = re.compile(r"(release/)?\.metadata")
_WEIGHT = re.compile(rf".*\.(safetensors|bin|pth|gguf|distcp)|.*{re.escape(LEGACY_FILE)}")
# The part of a name that differs among the files of one set of weights.
_NUMBER = re.compile(rf"\d+(?=-of-\d+\.|\.pth$|(_\d+)?\.distcp$|(_\d+)*/{re.escape(LEGACY_FILE)}$)")
_OPTIMIZER = re.compile(r"(^|\.)optim(izer)?\.")
_OUT = "move these files elsewhere, or choose another destination"
_ELSEWHERE = "choose another destination, or move this directory elsewhere first"


class Contents(Protocol):
    """Files of a directory, by their names relative to it."""

    def json(self, name: str) -> Mapping[str, Any]:
        """The JSON object in a file, or an empty one if it is missing or contains something else."""

    def digest(self, name: str) -> str | None:
        """Hexadecimal BLAKE3 of a file, or None if it cannot be read."""

    def fault(self, name: str) -> str | None:
        """Why a file of weights or a `.metadata` contradicts its name, or None if its header can be read."""


class _Directory:
    """A local directory. `optimizer`: the location of a training run's optimizer, if `fault` has found one."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.optimizer: str | None = None

    def json(self, name: str) -> Mapping[str, Any]:
        try:
            return read_json(self._root / name)
        except CkptkitError:  # absent, or not JSON
            return {}

    def digest(self, name: str) -> str | None:
        try:
            return file_digest(self._root / name)
        except CkptkitError:
            return None

    def fault(self, name: str) -> str | None:
        path = self._root / name
        try:
            if name.endswith(".safetensors"):
                return None if scan_shard(path).specs else f"{name} has no safetensors header"
            if name.endswith(".gguf"):
                with open_regular(path) as file:
                    return None if file.read(4) == b"GGUF" else f"{name} is not a GGUF file"
            keys: Iterable[str] = ()
            if _METADATA.fullmatch(name):
                keys = read_metadata(path.parent).keys
            elif name.endswith(LEGACY_FILE):
                content = SavedFile(path).content
                keys = [f"{key}." for key, value in content.items() if value] if isinstance(content, dict) else []
            elif not name.endswith(".distcp"):
                require_saved(path)
            if key := next(filter(_OPTIMIZER.search, keys), None):
                self.optimizer = f"{name} has {key.rstrip('.')}"
        except CkptkitError as error:
            return error.message
        except OSError as error:
            return f"{name}: {error.strerror}"
        return None


def require_checkpoint(path: object, names: Collection[str], contents: Contents) -> None:
    """Raises CkptkitError, naming other files, unless the files are those of exactly one checkpoint.

    `names`: all files, and empty folders with a trailing `/`. Files of an HF checkpoint, an adapter or a release in
    Megatron's format are known by name. Others, documents, code and a second set of weights must have their digests in
    `ckptkit.json`. Hidden files are not replaced. config.json must be a model's, and unlisted weights need a header.
    """
    manifest = contents.json(MANIFEST)
    files = manifest.get("files") if str(manifest.get("schema", "")).startswith(SCHEMAS) else None
    listed = files if isinstance(files, dict) else {}  # the digests of files by name
    layout = _weights_in(manifest.get("hf_layout")) if listed else set()
    index = contents.json(INDEX).get("weight_map")
    shards = _weights_in(index.values() if isinstance(index, dict) else ())
    not_hf = [name for name in names if not _OF_HF.fullmatch(name) and name not in layout | shards]
    not_megatron = [name for name in names if not _OF_MEGATRON.fullmatch(name)]
    unknown = {*(not_hf if len(not_hf) <= len(not_megatron) else not_megatron)}
    hidden = {name for name in unknown if any(part.startswith(".") for part in name.split("/"))}
    unknown |= {name for name in names if listed and _AS_LISTED.fullmatch(name)}
    unknown -= {name for name in unknown if name.endswith("/") and any(one.startswith(name) for one in listed)}
    if others := sorted(hidden | unknown - listed.keys()):
        message = f"{path} contains other files than a checkpoint's, so it is not replaced: {summarize(others)}"
        raise CkptkitError(message, _OUT)
    if changed := sorted(name for name in unknown if contents.digest(name) != listed[name]):
        message = f"{path} contains files changed since {MANIFEST} was written, so it is not replaced"
        raise CkptkitError(f"{message}: {summarize(changed)}", _OUT)
    set_of = _sets_of_weights(names, layout, shards)
    if firsts := _additional_sets(set_of, listed, contents):
        message = f"{path} contains weights of several checkpoints, so it is not replaced: {summarize(firsts)}"
        raise CkptkitError(message, "move all but one of these checkpoints elsewhere, or choose another destination")
    if (why := _why_not(names, contents, {*layout, *listed})) is not None:
        raise CkptkitError(f"{path} is not a checkpoint, so it is not replaced: {why}", _ELSEWHERE)


def _weights_in(names: object) -> set[str]:
    """The safetensors files among names in an index or a layout, which may be any names."""
    found = [name for name in names if isinstance(name, str)] if isinstance(names, Iterable) else []
    return {name for name in found if re.fullmatch(r"[^/]+\.safetensors", name)}


def _sets_of_weights(names: Collection[str], layout: Collection[str], shards: Collection[str]) -> dict[str, str]:
    """The set of each file of weights: that of an index, a manifest's layout, or its name without the number."""
    set_of = {name: _NUMBER.sub("#", name) for name in names if _WEIGHT.fullmatch(name)}
    set_of |= {name: MANIFEST for name in set_of if name in layout}
    set_of |= {name: INDEX for name in set_of if name in shards}
    return set_of | ({INDEX: INDEX} if shards else {})


def _additional_sets(set_of: Mapping[str, str], listed: Mapping[str, Any], contents: Contents) -> list[str]:
    """One file per set of weights if there are several unlisted ones; passthrough tensors are a separate set."""
    for is_carried in (False, True):
        some = {name: one for name, one in set_of.items() if name.startswith(_CARRIED) == is_carried}
        if len({*some.values()}) > 1:
            unlisted = [name for name in some if name not in listed or contents.digest(name) != listed[name]]
            some = {name: some[name] for name in unlisted}
        if len({*some.values()}) > 1:
            return sorted({one: name for name, one in sorted(some.items(), reverse=True)}.values())
    return []


def _why_not(names: Collection[str], contents: Contents, ours: Collection[str]) -> str | None:
    """Why files with the names of a checkpoint are not one, or None. `ours`: files in a manifest."""
    weights = [name for name in names if _WEIGHT.fullmatch(name)]
    metadata = [name for name in (*names, *ours) if _METADATA.fullmatch(name)]
    if not weights and not ours:
        return "it has no weights"
    is_megatron = metadata or any(name.endswith(LEGACY_FILE) for name in weights)
    if not is_megatron and not _is_described(contents) and not any(name in ours for name in weights):
        return "it has no config.json with a model_type or architectures, and no .metadata"
    for name in dict.fromkeys((*metadata, *weights)):  # `fault` also finds an optimizer in metadata
        fault = contents.fault(name) if name not in ours or name in metadata else None
        if fault is not None and name not in ours:
            return fault
    return None


def _is_described(contents: Contents) -> bool:
    """Whether there is a config.json of a model or an adapter_config.json of an adapter."""
    config, adapter = contents.json("config.json"), contents.json("adapter_config.json")
    classes = config.get("architectures")
    named = [config.get("model_type"), adapter.get("peft_type"), *(classes if isinstance(classes, list) else [])]
    return any(isinstance(one, str) and one for one in named)


def require_replaceable(path: Path, *, is_partial: bool = False) -> None:
    """Raises CkptkitError, naming files, unless `path` is an empty directory or one checkpoint.

    A Megatron root may only have the iteration `release`, without optimizer state. `is_partial`: it may also be the
    output of an interrupted run.
    """
    entry = path.lstat()
    if not stat.S_ISDIR(entry.st_mode):
        kind = f"a link to {os.readlink(path)}" if stat.S_ISLNK(entry.st_mode) else "not a directory"
        raise CkptkitError(f"{path} is {kind}, so it is not replaced", _ELSEWHERE)
    below = [(str(one.relative_to(path)), entry) for one, entry in walk_tree(path) if one != path]
    _require_removable(path, below)
    folders = {os.path.dirname(name) for name, _ in below}
    files = [name if not stat.S_ISDIR(entry.st_mode) else f"{name}/" for name, entry in below if name not in folders]
    if is_partial and (journal := Journal(path)).exists:
        links = [name for name, entry in below if stat.S_ISLNK(entry.st_mode)]
        if others := sorted({*links, *journal.not_written(files)}):
            message = f"{path} contains files that no run writes, so it is not replaced: {summarize(others)}"
            raise CkptkitError(message, _OUT)
        return
    if iterations := sorted({name for name, _ in below if ITERATION.fullmatch(name)}):
        message = f"{path} contains iterations of a training run, so it is not replaced: {summarize(iterations)}"
        raise CkptkitError(message, _ELSEWHERE)
    if is_partial:  # a run was killed while it removed its journal, last
        files = [name for name in files if not is_of_journal(name)]
    if files:
        directory = _Directory(path)
        require_checkpoint(path, files, directory)
        if directory.optimizer is not None:
            message = f"{path} contains the optimizer of a training run, so it is not replaced: {directory.optimizer}"
            raise CkptkitError(message, _ELSEWHERE)


def _require_removable(path: Path, below: Iterable[tuple[str, os.stat_result]]) -> None:
    """Raises CkptkitError for a mount point, which cannot be renamed, and for a pipe or a device."""
    if mounts := mounts_at(path):
        shown = "it" if mounts == [str(path)] else path
        message = f"{summarize(mounts)} is a mount point, so {shown} is not replaced"
        raise CkptkitError(message, "choose another destination, or unmount it")
    for name, entry in below:
        if stat.S_IFMT(entry.st_mode) not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            message = f"{path / name} is not a regular file, but {kind_of(entry)}, so {path} is not replaced"
            raise CkptkitError(message, _OUT)
