"""Files that are not here: a directory stands for an HF directory at a URL, with its small files and the headers of its shards.

Its mark says which URL: a symbolic link, which no download makes, to a file outside of it. A shard there is cut off behind its header, so
whoever takes it for the file itself finds it truncated, and never reads zeros.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.storage.url import Store

_MARK = ".ckptkit-remote"
_LISTING = "remote.json"


@dataclass(frozen=True)
class RemoteFile:
    """A file of `size` bytes in the directory at `url`. Plain data: threads and processes may share it."""

    url: str
    name: str
    size: int

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fills `buffer` from `offset` on. Returns how many bytes came. Raises CkptkitError as `Store` does."""
        return Store(self.url).read_into(self.name, buffer, offset)

    def __str__(self) -> str:
        return Store(self.url).at(self.name)


@dataclass(frozen=True)
class Listing:
    """What was at `url` when it was opened: the size of each file, and a text that is another one when the file was written again."""

    url: str
    sizes: Mapping[str, int]
    versions: Mapping[str, str]

    @classmethod
    def of(cls, store: Store) -> Listing:
        """What is there now. Raises CkptkitError as `Store` does."""
        files = store.files()
        sizes = {name: int(entry["size"]) for name, entry in files.items()}
        return cls(
            store.url, sizes, {name: json.dumps(entry, sort_keys=True, default=str) for name, entry in files.items()}
        )


def mark(root: Path, listing: Listing) -> None:
    """Makes `root` stand for what was listed."""
    (root.parent / _LISTING).write_text(json.dumps(vars(listing)))
    (root / _MARK).symlink_to(f"../{_LISTING}")


def listing_of(root: Path) -> Listing | None:
    """What the directory `root` stands for; None for one that stands for nothing but itself."""
    if not (root / _MARK).is_symlink():
        return None
    content: dict[str, Any] = json.loads((root / _MARK).read_text())
    return Listing(**content)


def spoken(path: Path) -> str:
    """A directory as the user knows it: the URL that it stands for, or its path."""
    listing = listing_of(path)
    return listing.url if listing else str(path)


def remote_file(path: Path) -> RemoteFile | None:
    """The file that `path` stands for; None where that is `path` itself, or nothing."""
    listing = listing_of(path.parent)
    return (
        RemoteFile(listing.url, path.name, listing.sizes[path.name]) if listing and path.name in listing.sizes else None
    )


def size_of(path: Path) -> int:
    """Bytes of a file, wherever it is. Raises OSError."""
    remote = remote_file(path)
    return remote.size if remote else path.stat().st_size
