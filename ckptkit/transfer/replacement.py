"""Decides what `--overwrite` may remove: one checkpoint, in a directory with nothing else."""

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
# Code of a model, by the names that transformers gives it.
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
_CARRIED = "carried/"  # what ckptkit keeps next to a release: `ckptkit.converters.passthrough.FOLDER`
_CARRIED_WEIGHTS = r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
_OURS = r"ckptkit\.json(\.sig)?|config\.json\.orig"
# What huggingface_hub keeps of a download. Source: its `_local_folder.py`.
_DOWNLOAD = (
    r"\.cache/huggingface/(\.gitignore(\.lock)?|CACHEDIR\.TAG|(down|up)load/(.*(/|\.metadata|\.lock|\.incomplete))?)"
)
# The files of a checkpoint of each kind, and its folders, which end in `/` where they are empty.
_OF_HF = re.compile(rf"{_SIDE}|{_WEIGHTS}|{_OURS}|{_DOWNLOAD}")
_OF_MEGATRON = re.compile(
    rf"{re.escape(TRACKER)}|{_OURS}|hf/({_SIDE})?|{_CARRIED}(config\.json|{_CARRIED_WEIGHTS})?"
    r"|(release/)?(\.metadata|metadata\.json|common\.pt|run_config\.yaml|train_state\.pt|__\d+_\d+\.distcp)?"
    rf"|(release/)?{LEGACY_RANK.pattern}/({re.escape(LEGACY_FILE)})?"
)
# What loaders do not read, or only as code: somebody's own work, unless a manifest lists it as it is.
_AS_LISTED = re.compile(rf"(hf/)?({_DOCUMENT}|{_CODE})")
_METADATA = re.compile(r"(release/)?\.metadata")
_WEIGHT = re.compile(rf".*\.(safetensors|bin|pth|gguf|distcp)|.*{re.escape(LEGACY_FILE)}")
# The numbers by which the files of one set of weights differ.
_NUMBER = re.compile(rf"\d+(?=-of-\d+\.|\.pth$|(_\d+)?\.distcp$|(_\d+)*/{re.escape(LEGACY_FILE)}$)")
_OPTIMIZER = re.compile(r"(^|\.)optim(izer)?\.")
_OUT = "move it out of there, or choose another destination"
_ELSEWHERE = "choose another destination, or move it away first"


class Contents(Protocol):
    """Files of a directory, by their names relative to it."""

    def json(self, name: str) -> Mapping[str, Any]:
        """The JSON object in a file, or an empty one if it is absent or contains something else."""

    def digest(self, name: str) -> str | None:
        """BLAKE3 of a file in hexadecimal, or None if it cannot be read."""

    def fault(self, name: str) -> str | None:
        """Why a file of weights or a `.metadata` is not what its name says, or None if its header can be read."""


class _Directory:
    """A directory of this machine. `optimizer`: where `fault` has seen that of a training run, in words, if it has."""

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
                return None if scan_shard(path).specs else f"{name} has no header of safetensors"
            if name.endswith(".gguf"):
                with open_regular(path) as file:
                    return None if file.read(4) == b"GGUF" else f"{name} is not GGUF"
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


def require_checkpoint(what: object, names: Collection[str], there: Contents) -> None:
    """Raises CkptkitError, naming what is in the way, unless files are those of one checkpoint and nothing else.

    `names` are all files, and empty folders with a `/` behind them. Files of an HF checkpoint, an adapter or a release
    in Megatron's format are known by name. Others, documents, code and a second set of weights must be as
    `ckptkit.json` lists them. Hidden files are in the way. config.json must be a model's, and unlisted weights must
    have a header.
    """
    manifest = there.json(MANIFEST)
    files = manifest.get("files") if str(manifest.get("schema", "")).startswith(SCHEMAS) else None
    listed = files if isinstance(files, dict) else {}  # the digests of files by name
    layout = _weights_in(manifest.get("hf_layout")) if listed else set()
    index = there.json(INDEX).get("weight_map")
    shards = _weights_in(index.values() if isinstance(index, dict) else ())
    of_no_model = [name for name in names if not _OF_HF.fullmatch(name) and name not in layout | shards]
    of_no_run = [name for name in names if not _OF_MEGATRON.fullmatch(name)]
    unknown = {*(of_no_model if len(of_no_model) <= len(of_no_run) else of_no_run)}
    hidden = {name for name in unknown if any(part.startswith(".") for part in name.split("/"))}
    unknown |= {name for name in names if listed and _AS_LISTED.fullmatch(name)}
    unknown -= {name for name in unknown if name.endswith("/") and any(one.startswith(name) for one in listed)}
    if others := sorted(hidden | unknown - listed.keys()):
        message = f"{what} contains other files than a checkpoint's, so it is not replaced: {summarize(others)}"
        raise CkptkitError(message, _OUT)
    if changed := sorted(name for name in unknown if there.digest(name) != listed[name]):
        message = (
            f"{what} holds files changed since {MANIFEST} was written, so it is not replaced: {summarize(changed)}"
        )
        raise CkptkitError(message, "move them out of there, or choose another destination")
    set_of = _sets_of_weights(names, layout, shards)
    if firsts := _several(set_of, listed, there):
        message = f"{what} holds weights of several checkpoints, so it is not replaced: {summarize(firsts)}"
        raise CkptkitError(message, "move all but one of them out of there, or choose another destination")
    if (why := _why_not(names, there, {*layout, *listed})) is not None:
        raise CkptkitError(f"{what} is not a checkpoint, so it is not replaced: {why}", _ELSEWHERE)


def _weights_in(names: object) -> set[str]:
    """The safetensors files among names in an index or in a layout, which a release may call as it likes."""
    found = [name for name in names if isinstance(name, str)] if isinstance(names, Iterable) else []
    return {name for name in found if re.fullmatch(r"[^/]+\.safetensors", name)}


def _sets_of_weights(names: Collection[str], layout: Collection[str], shards: Collection[str]) -> dict[str, str]:
    """The set that each file of weights is part of: of an index, a manifest's layout, or its name without the number.

    An index is of no other weights than its `shards`, also where these are not there.
    """
    set_of = {name: _NUMBER.sub("#", name) for name in names if _WEIGHT.fullmatch(name)}
    set_of |= {name: MANIFEST for name in set_of if name in layout}
    set_of |= {name: INDEX for name in set_of if name in shards}
    return set_of | ({INDEX: INDEX} if shards else {})


def _several(set_of: Mapping[str, str], listed: Mapping[str, Any], there: Contents) -> list[str]:
    """A file of each set of weights, where there is more than one; none where a manifest lists all others as they are.

    What is carried along with a release in Megatron's format is a set of its own.
    """
    for is_carried in (False, True):
        some = {name: one for name, one in set_of.items() if name.startswith(_CARRIED) == is_carried}
        if len({*some.values()}) > 1:
            some = {name: one for name, one in some.items() if name not in listed or there.digest(name) != listed[name]}
        if len({*some.values()}) > 1:
            return sorted({one: name for name, one in sorted(some.items(), reverse=True)}.values())
    return []


def _why_not(names: Collection[str], there: Contents, ours: Collection[str]) -> str | None:
    """Why files with the names of a checkpoint are not one, or None. `ours`: files that a manifest names."""
    weights = [name for name in names if _WEIGHT.fullmatch(name)]
    metadata = [name for name in (*names, *ours) if _METADATA.fullmatch(name)]
    if not weights and not ours:
        return "it has no weights"
    is_megatron = metadata or any(name.endswith(LEGACY_FILE) for name in weights)
    if not is_megatron and not _is_described(there) and not any(name in ours for name in weights):
        return "it has no config.json with a model_type or architectures, and no .metadata"
    for name in dict.fromkeys((*metadata, *weights)):  # metadata also for the optimizer in it
        fault = there.fault(name) if name not in ours or name in metadata else None
        if fault is not None and name not in ours:
            return fault
    return None


def _is_described(there: Contents) -> bool:
    """Whether a config.json is that of a model, or an adapter_config.json that of an adapter."""
    config, adapter = there.json("config.json"), there.json("adapter_config.json")
    classes = config.get("architectures")
    named = [config.get("model_type"), adapter.get("peft_type"), *(classes if isinstance(classes, list) else [])]
    return any(isinstance(one, str) and one for one in named)


def require_replaceable(path: Path, *, is_partial: bool = False) -> None:
    """Raises CkptkitError, naming what is in the way, unless nothing would be lost if `path` were replaced.

    It must be an empty directory or one checkpoint: in Megatron's root no other iteration than `release`, and no state
    of an optimizer. `is_partial`: it may also be what a run that was cut off has left.
    """
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        what = f"a link to {os.readlink(path)}" if stat.S_ISLNK(found.st_mode) else "not a directory"
        raise CkptkitError(f"{path} is {what}, so it is not replaced", _ELSEWHERE)
    below = [(str(one.relative_to(path)), entry) for one, entry in walk_tree(path) if one != path]
    _require_removable(path, below)
    folders = {os.path.dirname(name) for name, _ in below}
    files = [name if not stat.S_ISDIR(entry.st_mode) else f"{name}/" for name, entry in below if name not in folders]
    if is_partial and (journal := Journal(path)).exists:
        links = [name for name, entry in below if stat.S_ISLNK(entry.st_mode)]
        if others := sorted({*links, *journal.not_written(files)}):
            message = f"{path} holds what no run writes, so it is not replaced: {summarize(others)}"
            raise CkptkitError(message, _OUT)
        return
    if iterations := sorted({name for name, _ in below if ITERATION.fullmatch(name)}):
        message = f"{path} holds iterations of a training run, so it is not replaced: {summarize(iterations)}"
        raise CkptkitError(message, _ELSEWHERE)
    if is_partial:  # a run was killed while it removed its journal, which goes last
        files = [name for name in files if not is_of_journal(name)]
    if files:
        there = _Directory(path)
        require_checkpoint(path, files, there)
        if there.optimizer is not None:
            message = f"{path} holds the optimizer of a training run, so it is not replaced: {there.optimizer}"
            raise CkptkitError(message, _ELSEWHERE)


def _require_removable(path: Path, below: Iterable[tuple[str, os.stat_result]]) -> None:
    """Raises CkptkitError for a mount point, which cannot be renamed, and for a pipe or a device."""
    if mounts := mounts_at(path):
        what = "it" if mounts == [str(path)] else path
        message = f"{summarize(mounts)} is a mount point, so {what} is not replaced"
        raise CkptkitError(message, "choose another destination, or unmount it")
    for name, entry in below:
        if stat.S_IFMT(entry.st_mode) not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            message = f"{path / name} is not a regular file, but {kind_of(entry)}, so {path} is not replaced"
            raise CkptkitError(message, _OUT)
