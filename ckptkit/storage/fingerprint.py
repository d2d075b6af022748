"""Tells whether files are those that were seen before, without reading them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.storage.directory import Directory, directory


def fingerprint(folders: Iterable[Path | Directory]) -> str:
    """SHA-256 over path, size and last change of every file below these folders; at a URL, over what the store says."""
    digest = hashlib.sha256()
    for folder in map(directory, folders):
        if folder.remote is not None:
            digest.update(json.dumps([folder.remote.url, sorted(folder.remote.versions.items())]).encode())
            continue
        for path in sorted(folder.path.rglob("*")):
            if path.is_file():
                found = path.stat()
                digest.update(json.dumps([str(path), found.st_size, found.st_mtime_ns]).encode())
    return digest.hexdigest()


class ChangedError(CkptkitError):
    """What was being read has been written meanwhile."""

    resumable = False


@contextmanager
def unchanged(folders: Iterable[Path]) -> Iterator[None]:
    """Raises ChangedError where a file below these folders was written, cut or removed while the block ran.

    Also in place of what the block raised then: that is what came of it.
    """
    watched = list(folders)
    before = fingerprint(watched)
    try:
        yield
    except (OSError, CkptkitError) as error:
        _check(watched, before, error)
        raise
    _check(watched, before, None)


def _check(folders: Iterable[Path], before: str, cause: Exception | None) -> None:
    if fingerprint(folders) != before:
        paths = " or ".join(map(str, folders))
        raise ChangedError(f"{paths} changed while it was read", "run again when nothing writes there") from cause
