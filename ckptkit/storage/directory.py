"""A directory to read: local, or at a URL with local copies of its small files and headers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptkit.storage.url import Store


@dataclass(frozen=True)
class RemoteFile:
    """A file of `size` bytes in the directory at `url`; threads and processes can share this data."""

    url: str
    name: str
    size: int

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fills `buffer` from `offset` on. Returns the number of bytes. Raises CkptkitError like `Store`."""
        return Store(self.url).read_into(self.name, buffer, offset)

    def __str__(self) -> str:
        return Store(self.url).at(self.name)


@dataclass(frozen=True)
class Listing:
    """The files at `url`: the size of each, and a text that changes when the file is written."""

    url: str
    sizes: Mapping[str, int]
    versions: Mapping[str, str]

    @classmethod
    def of(cls, store: Store) -> Listing:
        """The current listing. Raises CkptkitError like `Store`."""
        files = store.files()
        sizes = {name: int(entry["size"]) for name, entry in files.items()}
        versions = {name: json.dumps(entry, sort_keys=True, default=str) for name, entry in files.items()}
        return cls(store.url, sizes, versions)


@dataclass(frozen=True)
class Directory:
    """Files at `path`, or with `remote` copies of files at a URL, and only the headers of shards."""

    path: Path
    remote: Listing | None = None

    def __str__(self) -> str:
        return self.remote.url if self.remote else str(self.path)

    def at(self, name: str) -> str:
        """The path or URL of a file, for people."""
        return Store(self.remote.url).at(name) if self.remote else str(self.path / name)

    def remote_file(self, name: str) -> RemoteFile | None:
        """The file at the URL, with size 0 if missing, or None for a local directory."""
        return RemoteFile(self.remote.url, name, self.remote.sizes.get(name, 0)) if self.remote else None

    def size(self, name: str) -> int:
        """Size of a file in bytes. Raises OSError."""
        remote = self.remote_file(name)
        return remote.size if remote else (self.path / name).stat().st_size


def directory(path: str | Path | Directory) -> Directory:
    """The directory at a local path; a Directory is returned unchanged."""
    return path if isinstance(path, Directory) else Directory(Path(path))
