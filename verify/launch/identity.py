"""Tells whether directories are still what they were: every file by name, size, times and inode, without reading one.

A checkpoint of a trillion parameters has some hundred files, so this takes milliseconds where its headers take seconds.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptkit.formats.detect import TRACKER

_MOST_FILES, _MOST_LEVELS = 20_000, 8


class _UnknownError(Exception):
    """A directory that cannot be told again: a device or a pipe in it, too many files, or one that cannot be read."""


@dataclass(frozen=True)
class Identity:
    """A digest of the state of some directories, and when anything in them last changed, in seconds of the epoch."""

    digest: str
    changed: float


def identity_of(paths: Iterable[Path]) -> Identity | None:
    """The state of these directories and of all that a check of them looks at; None where it cannot be told again.

    Beside an iteration of Megatron that is its root, and `hf/` there. A file or directory that is absent counts too:
    where it appears, the state is another.
    """
    lines: list[str] = []
    newest = 0
    try:
        for path, levels in sorted(_looked_at(paths)):
            lines.append(f"{path}\0{levels}")
            for line, changed in _states(path, levels):
                lines.append(line)
                newest = max(newest, changed)
                if len(lines) > _MOST_FILES:
                    return None
    except (_UnknownError, OSError):
        return None
    return Identity(hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest(), newest / 1e9)


def _looked_at(paths: Iterable[Path]) -> set[tuple[Path, int]]:
    """Directories, with how many levels of them count."""
    found: set[tuple[Path, int]] = set()
    for given in paths:
        path = Path(os.path.abspath(given))
        found.add((path, _MOST_LEVELS))
        if path.name == "original":
            raise _UnknownError  # the files of authors: whether it is looked at depends on what is beside it
        weights = (path / ".metadata").exists() or any(path.glob("*.distcp"))
        if weights or not ((path / TRACKER).exists() or (path / "config.json").exists()):
            # An iteration's config, tracker and manifest are beside it, whatever else is inside.
            found |= {(path.parent, 1), (path.parent / "hf", _MOST_LEVELS)}
    return found


def _states(path: Path, levels: int, inside: str = "") -> Iterator[tuple[str, int]]:
    """A line for everything in a directory, and when it changed, in nanoseconds."""
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except FileNotFoundError:
        yield f"{inside}\0absent", 0
        return
    if levels < 0:
        raise _UnknownError
    for entry in entries:
        name = f"{inside}/{entry.name}"
        link = entry.is_symlink()
        try:
            at = entry.stat()
        except FileNotFoundError:  # a link to nothing, which may be something later
            at = entry.stat(follow_symlinks=False)
        if not (stat.S_ISREG(at.st_mode) or stat.S_ISDIR(at.st_mode) or stat.S_ISLNK(at.st_mode)):
            raise _UnknownError
        numbers = (at.st_dev, at.st_ino, at.st_mode, at.st_size, at.st_mtime_ns, at.st_ctime_ns)
        yield f"{name}\0{os.readlink(entry.path) if link else ''}\0{numbers}", max(at.st_mtime_ns, at.st_ctime_ns)
        if stat.S_ISDIR(at.st_mode) and levels > 1:
            yield from _states(Path(entry.path), levels - 1, name)


def identity_of_program(roots: Iterable[Path]) -> str:
    """A digest of the state of the Python files under these directories: an edit makes another program of it."""
    lines = [
        f"{path}\0{at.st_size}\0{at.st_mtime_ns}\0{at.st_ctime_ns}"
        for root in roots
        for path in sorted(root.rglob("*.py"))
        for at in [path.stat()]
    ]
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()
