"""A directory to read: on this machine, or at a URL, with its small files and headers of shards copied here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptkit.storage.url import Store


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
    """What is at `url`: the size of each file, and a text that is another one when the file was written again."""

    url: str
    sizes: Mapping[str, int]
    versions: Mapping[str, str]

    @classmethod
    def of(cls, store: Store) -> Listing:
        """What is there now. Raises CkptkitError as `Store` does."""
        files = store.files()
        sizes = {name: int(entry["size"]) for name, entry in files.items()}
        versions = {name: json.dumps(entry, sort_keys=True, default=str) for name, entry in files.items()}
        return cls(store.url, sizes, versions)


@dataclass(frozen=True)
class Directory:
    """Files at `path`. With `remote` they are copies of what is at a URL, where every shard ends after its header."""

    path: Path
    remote: Listing | None = None

    def __str__(self) -> str:
        return self.remote.url if self.remote else str(self.path)

    def at(self, name: str) -> str:
        """The path or URL of a file, for people."""
        return Store(self.remote.url).at(name) if self.remote else str(self.path / name)

    def remote_file(self, name: str) -> RemoteFile | None:
        """The file at the URL, of no bytes if there is none; None in a directory of this machine."""
        return RemoteFile(self.remote.url, name, self.remote.sizes.get(name, 0)) if self.remote else None

    def size(self, name: str) -> int:
        """Bytes of a file. Raises OSError."""
        remote = self.remote_file(name)
        return remote.size if remote else (self.path / name).stat().st_size


def directory(path: str | Path | Directory) -> Directory:
    """What is at a path of this machine; a Directory as it is."""
    return path if isinstance(path, Directory) else Directory(Path(path))
