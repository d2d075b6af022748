"""Walks directories that others made: within bounds, and along links only where they stay in the checkpoint."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.storage.regular import kind_of

MAX_DEPTH = 64  # folders inside one another
MAX_FILES = 1_000_000  # files and folders of a checkpoint
_METADATA = ".metadata"  # the hidden file that is part of a checkpoint
# Source: huggingface_hub, `file_download.py` (`repo_folder_name`, `_get_pointer_path`) and `utils/_shared_blobs.py`.
_SNAPSHOT = re.compile(r"((.*)/models--[^/]+)/snapshots/[^/]+(?:/.*)?")
_SHARED_BLOB = re.compile(r"/blobs/([0-9a-f]{2})/\1[0-9a-f]{62}")


class ForeignFileError(CkptkitError):
    """A directory holds what is not a file of the checkpoint in it: a link out of it, a pipe, a socket or a device."""


def files_below(root: Path, within: Path | None = None) -> list[Path]:
    """Every file below `root`, relative to it and sorted; none where there is no such directory.

    Hidden files are left out, but for Megatron's `.metadata`. Links are followed inside `within` (None: `root`), and
    from a snapshot of the hub's cache into its model's blobs; those that lead to nothing are listed. Raises
    ForeignFileError for other links and special files, and CkptkitError for more than MAX_FILES files or folders deeper
    than MAX_DEPTH.
    """
    bound = os.path.realpath(within or root)
    if within not in (None, root) and root.is_symlink():
        _require_inside(str(root), bound, ())
    found, count = list[Path](), 0
    folders = [(Path(), tuple[str, ...]())]  # with the folders that hold the links on the way there
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
                raise ForeignFileError(message, "put the file of the release in its place, or move it elsewhere")
            else:
                found.append(relative)
            if len(relative.parts) > MAX_DEPTH or count > MAX_FILES:
                much = f"more than {MAX_FILES} files" if count > MAX_FILES else f"folders more than {MAX_DEPTH} deep"
                raise CkptkitError(f"{root} holds {much}", "move everything else out of the checkpoint's directory")
    return sorted(found)


def walk_tree(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """A path and all that is below it, hidden or not, links not followed. Raises OSError where it is not there."""
    found = root.lstat()
    yield root, found
    folders = [root] if stat.S_ISDIR(found.st_mode) else []
    while folders:
        for path in folders.pop().iterdir():
            found = path.lstat()
            yield path, found
            if stat.S_ISDIR(found.st_mode):
                folders.append(path)


def mounts_at(root: Path) -> list[str]:
    """The mount points that are `root` or below it, also those of a file system that is mounted a second time."""
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
    """What is in a folder; nothing where it is not there, is no folder, or may not be read."""
    if not os.path.isdir(folder):
        return []
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, PermissionError):
        return []


def _require_inside(link: str, bound: str, around: Sequence[str]) -> None:
    """Raises ForeignFileError for a link to a file or folder that is not part of the checkpoint in `bound`.

    Hidden files (`.git/config`) are not part of it. `around`: folders that the link is in, by whatever links.
    """
    real, shown = os.path.realpath(link), os.readlink(link)
    if any(f"{folder}/".startswith(f"{real}/") for folder in around):
        why = "which is a folder around it"
    elif real.startswith(f"{bound}/"):
        hidden = [part for part in real[len(bound) + 1 :].split("/") if part.startswith(".")]
        if hidden in ([], [_METADATA]):
            return
        why = "which is hidden, so not part of the checkpoint"
    elif (
        (snapshot := _SNAPSHOT.fullmatch(bound))
        and (
            os.path.dirname(real) == f"{snapshot[1]}/blobs"
            # of the store that the models of a hub's cache share
            or (real.startswith(snapshot[2]) and _SHARED_BLOB.fullmatch(real[len(snapshot[2]) :]) is not None)
        )
    ):
        return
    else:
        why = f"which is outside {bound}"
    target = shown if os.path.isabs(shown) else f"{shown} ({real})"
    hint = "copy the file in its place (`cp -rL` copies a directory so), or remove the link"
    raise ForeignFileError(f"{link} is a link to {target}, {why}", hint)


Identity = tuple[int, int]


def overlaps(target: Path, source: Path) -> bool:
    """Whether writing or replacing directory `target`, which need not exist, would change `source`. Raises OSError."""
    if not source.exists():
        return False
    folders = {_identity(found) for _, found in walk_tree(source) if stat.S_ISDIR(found.st_mode)}
    if not folders.isdisjoint(_identity(parent.stat()) for parent in target.resolve().parents):
        return True
    return target.exists() and not set(_read(source)).isdisjoint(_identity(found) for _, found in walk_tree(target))


def _read(root: Path) -> Iterator[Identity]:
    """What would be lost: directories, files with one name, and whatever links lead to.

    A file with a second name (a hard link) stays when the first is removed, and nothing is written in place.
    """
    for path, found in walk_tree(root):
        if not stat.S_ISLNK(found.st_mode):
            if stat.S_ISDIR(found.st_mode) or found.st_nlink == 1:
                yield _identity(found)
        elif path.exists():
            yield _identity(path.stat())


def _identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino
