"""Walks untrusted directories: within limits, and along links only inside the checkpoint."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.storage.regular import kind_of

MAX_DEPTH = 64  # nested folders
MAX_FILES = 1_000_000  # files and folders of a checkpoint
_METADATA = ".metadata"  # the hidden file that is part of a checkpoint
# Source: huggingface_hub, `file_download.py` (`repo_folder_name`, `_get_pointer_path`) and `utils/_shared_blobs.py`.
_SNAPSHOT = re.compile(r"((.*)/models--[^/]+)/snapshots/[^/]+(?:/.*)?")
_SHARED_BLOB = re.compile(r"/blobs/([0-9a-f]{2})/\1[0-9a-f]{62}")


class ForeignFileError(CkptkitError):
    """A directory contains a link to the outside, a pipe, a socket or a device."""


def files_below(root: Path, within: Path | None = None) -> list[Path]:
    """Every file below `root`, relative to it and sorted, or none if there is no such directory.

    Omits hidden files except Megatron's `.metadata`. Follows links inside `within` (default: `root`), and from a
    snapshot of the hub's cache into its model's blobs; lists broken ones. Raises ForeignFileError for other links and
    special files, and CkptkitError for more than MAX_FILES files or folders deeper than MAX_DEPTH.
    """
    bound = os.path.realpath(within or root)
    if within not in (None, root) and root.is_symlink():
        _require_inside(str(root), bound, ())
    found, count = list[Path](), 0
    folders = [(Path(), tuple[str, ...]())]  # with the folders of the links that lead there
    while folders:
        folder, linked = folders.pop()
        for entry in _entries(root / folder):
            relative = folder / entry.name
            if entry.name.startswith(".") and entry.name != _METADATA:
                continue
            around = (*linked, os.path.realpath(root / folder)) if entry.is_symlink() else linked
            if entry.is_symlink():
                _require_inside(entry.path, bound, around)
            count += 1
            if os.path.isdir(entry):
                folders.append((relative, around))
            elif os.path.exists(entry) and not os.path.isfile(entry):
                message = f"{entry.path} is not a regular file, but {kind_of(os.stat(entry.path))}"
                raise ForeignFileError(message, "replace it with the file of the release, or move it elsewhere")
            else:
                found.append(relative)
            if len(relative.parts) > MAX_DEPTH or count > MAX_FILES:
                much = f"more than {MAX_FILES} files" if count > MAX_FILES else f"folders over {MAX_DEPTH} levels deep"
                raise CkptkitError(f"{root} contains {much}", "move files that are not the checkpoint's elsewhere")
    return sorted(found)


def walk_tree(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """A path and everything below it, also hidden, without following links. Raises OSError if it is missing."""
    paths = [root]
    while paths:
        path = paths.pop()
        yield path, (entry := path.lstat())
        if stat.S_ISDIR(entry.st_mode):
            paths += path.iterdir()


def mounts_at(root: Path) -> list[str]:
    """The mount points at or below `root`, including bind mounts."""
    real = os.path.realpath(root)
    found = {real} if os.path.ismount(real) else set()
    with suppress(OSError), open("/proc/self/mountinfo", "rb") as table:
        # Source: proc(5): the fifth field, in which spaces, tabs, newlines and backslashes are octal.
        for line in table:
            name = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), line.split(b" ")[4])
            if f"{os.fsdecode(name)}/".startswith(f"{real}/"):
                found.add(os.fsdecode(name))
    return sorted(found)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder, or none if it is missing, not a folder, or not readable."""
    if not os.path.isdir(folder):
        return []
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, PermissionError):
        return []


def _require_inside(link: str, bound: str, around: Sequence[str]) -> None:
    """Raises ForeignFileError for a link to a file or folder that is not part of the checkpoint in `bound`.

    Hidden files (`.git/config`) are not part of it. `around`: folders that contain the link, also through links.
    """
    real, shown = os.path.realpath(link), os.readlink(link)
    if any(f"{folder}/".startswith(f"{real}/") for folder in around):
        why = "which is a folder around it"
    elif real.startswith(f"{bound}/"):
        hidden = [part for part in real[len(bound) + 1 :].split("/") if part.startswith(".")]
        if hidden in ([], [_METADATA]):
            return
        why = "which is hidden, so not part of the checkpoint"
    else:
        if snapshot := _SNAPSHOT.fullmatch(bound):
            is_shared = real.startswith(snapshot[2]) and _SHARED_BLOB.fullmatch(real[len(snapshot[2]) :])
            if os.path.dirname(real) == f"{snapshot[1]}/blobs" or is_shared:
                return
        why = f"which is outside {bound}"
    target = shown if os.path.isabs(shown) else f"{shown} ({real})"
    hint = "replace the link with the file (`cp -rL` copies a directory in this way), or remove it"
    raise ForeignFileError(f"{link} is a link to {target}, {why}", hint)


Identity = tuple[int, int]


def overlaps(target: Path, source: Path) -> bool:
    """Whether writing or replacing directory `target`, which may be missing, would change `source`. Raises OSError."""
    if not source.exists():
        return False
    folders = {_identity(entry) for _, entry in walk_tree(source) if stat.S_ISDIR(entry.st_mode)}
    if not folders.isdisjoint(_identity(parent.stat()) for parent in target.resolve().parents):
        return True
    return target.exists() and not set(_losable(source)).isdisjoint(_identity(entry) for _, entry in walk_tree(target))


def _losable(root: Path) -> Iterator[Identity]:
    """Entries that a removal would lose: directories, files without other hard links, and targets of links."""
    for path, entry in walk_tree(root):
        if not stat.S_ISLNK(entry.st_mode):
            if stat.S_ISDIR(entry.st_mode) or entry.st_nlink == 1:
                yield _identity(entry)
        elif path.exists():
            yield _identity(path.stat())


def _identity(entry: os.stat_result) -> Identity:
    return entry.st_dev, entry.st_ino
