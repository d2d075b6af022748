"""Tells whether two directories share something on disk, by whatever links and mounts they are reached.

It compares the device and the inode of files and directories. A file system that is mounted a second time as a device
of its own (NFS without a shared cache, FUSE), or seen through an overlay, has other numbers and is not recognised.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ckptkit.storage.tree import everything

Identity = tuple[int, int]


def overlaps(target: Path, source: Path) -> bool:
    """Whether writing or replacing directory `target`, which need not exist, would change `source`. Raises OSError."""
    if not source.exists():
        return False
    folders = {_identity(found) for _, found in everything(source) if stat.S_ISDIR(found.st_mode)}
    if not folders.isdisjoint(_identity(parent.stat()) for parent in target.resolve().parents):
        return True
    return target.exists() and not set(_read(source)).isdisjoint(_identity(found) for _, found in everything(target))


def _read(root: Path) -> Iterator[Identity]:
    """What would be lost: directories, files with one name, and whatever links lead to.

    A file with a second name (a hard link) stays when the first is removed, and nothing is written in place.
    """
    for path, found in everything(root):
        if not stat.S_ISLNK(found.st_mode):
            if stat.S_ISDIR(found.st_mode) or found.st_nlink == 1:
                yield _identity(found)
        elif path.exists():
            yield _identity(path.stat())


def _identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino
