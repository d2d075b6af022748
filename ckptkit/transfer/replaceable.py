"""Says what of a directory `--overwrite` must not remove: all that is not a file of one checkpoint."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.specs import summarize
from ckptkit.formats.detect import ITERATION, LEGACY_FILE, LEGACY_RANK, LOADED, MANIFEST, SIGNATURE_ENDING, TRACKER
from ckptkit.formats.hf.reader import read_json
from ckptkit.storage.tree import everything
from ckptkit.transfer.journal import JOURNAL, Journal

SCHEMAS = "ckptkit-manifest/"
_FILES = {
    *LOADED,
    *(MANIFEST, MANIFEST + SIGNATURE_ENDING, TRACKER, ".metadata", "common.pt", "run_config.yaml", "train_state.pt"),
    *("merges.txt", "vocab.txt", "config.json.orig", "README.md", "USE_POLICY.md", ".gitattributes"),
}
_PATTERNS = re.compile(
    r".*\.(safetensors|safetensors\.index\.json|distcp|gguf|jinja|model|tiktoken|spm)"
    r"|pytorch_model.*\.bin|consolidated.*\.pth|(LICEN[CS]E|NOTICE)(\.txt|\.md)?"
    # Code of a model, by the names that transformers gives it.
    r"|(modeling|modular|configuration|tokenization|processing|image_processing|video_processing|feature_extraction)_"
    r"\w+\.py"
)
# Folders of a checkpoint; of the hub's client the metadata of a download.
_FOLDERS = re.compile(rf"((release|hf|carried|additional_chat_templates|{LEGACY_RANK.pattern})(/|$))*")
_MARKS = {"config.json", "adapter_config.json", MANIFEST, TRACKER, ".metadata", LEGACY_FILE}
_ELSEWHERE = "choose another destination, or move it away first"
_DOWNLOAD = ".cache/huggingface/"
_RUN_FOLDERS = re.compile(rf"(release/)?{LEGACY_RANK.pattern}/{re.escape(LEGACY_FILE)}")


def in_the_way(names: Iterable[str], listed: Collection[str]) -> list[str]:
    """Those of these files and empty folders (which end in `/`), named relative to a directory, that must stay there.

    They are neither weights nor known files beside weights, and are not `listed` in the directory's manifest.
    """
    return sorted(name for name in names if name not in listed and not _is_known(name))


def _is_known(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    if name.startswith(_DOWNLOAD):
        return True
    if _FOLDERS.fullmatch(folder) is None:
        return False
    return not file or file in _FILES or _PATTERNS.fullmatch(file) is not None or bool(_RUN_FOLDERS.fullmatch(name))


def listed_in(manifest: dict[str, Any]) -> set[str]:
    """The files that a manifest of ckptkit names; none of anything else."""
    files = manifest.get("files")
    is_ours = str(manifest.get("schema", "")).startswith(SCHEMAS) and isinstance(files, dict)
    return set(files) if is_ours and isinstance(files, dict) else set()


def require_replaceable(path: Path, *, is_partial: bool = False) -> None:
    """Raises CkptkitError, naming what is in the way, unless nothing would be lost if `path` were replaced.

    It must be an empty directory or one checkpoint: in Megatron's root no other iteration than `release`. `is_partial`:
    it may also be what a run that was cut off has left.
    """
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        what = f"a link to {os.readlink(path)}" if stat.S_ISLNK(found.st_mode) else "not a directory"
        raise CkptkitError(f"{path} is {what}, so it is not replaced", _ELSEWHERE)
    below = [(str(one.relative_to(path)), entry.st_mode) for one, entry in everything(path) if one != path]
    if is_partial and Journal(path).exists:
        others = [name for name, mode in below if stat.S_ISLNK(mode)]
    else:
        if others := sorted({name for name, _ in below if ITERATION.fullmatch(name)}):
            message = f"{path} holds iterations of a training run, so it is not replaced: {summarize(others)}"
            raise CkptkitError(message, _ELSEWHERE)
        folders = {os.path.dirname(name) for name, _ in below}
        files = [name if not stat.S_ISDIR(mode) else f"{name}/" for name, mode in below if name not in folders]
        if is_partial:  # its journal may have been half removed
            files = [name for name in files if not name.startswith(f"{JOURNAL}/")]
        others = in_the_way(files, _listed(path / MANIFEST))
        if files and not others and not any(map(_is_mark, files)):
            raise CkptkitError(f"{path} is not a checkpoint, so it is not replaced", _ELSEWHERE)
    if others:
        message = f"{path} holds what is not part of a checkpoint, so it is not replaced: {summarize(others)}"
        raise CkptkitError(message, "move it out of there, or choose another destination")


def _is_mark(name: str) -> bool:
    """Whether only a checkpoint has such a file."""
    file = name.rpartition("/")[2]
    return file in _MARKS or file.endswith((".safetensors", ".distcp"))


def _listed(manifest: Path) -> set[str]:
    try:
        return listed_in(read_json(manifest))
    except CkptkitError:  # not there, or not a manifest
        return set()
