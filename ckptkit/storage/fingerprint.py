"""Detects changed files without reading them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.storage.directory import Directory, directory

# Whether to include a file, by its path relative to the folder.
Counts = Callable[[Path], bool]


def fingerprint(
    folders: Iterable[Path | Directory], counts: Counts = lambda _: True, *, is_strict: bool = False
) -> str:
    """SHA-256 over path, size and mtime (and ctime if `is_strict`) of files that `counts`; for URLs over listings."""
    digest = hashlib.sha256()
    for folder in map(directory, folders):
        if folder.remote is not None:
            digest.update(json.dumps([folder.remote.url, sorted(folder.remote.versions.items())]).encode())
            continue
        for path in sorted(Path(parent, name) for parent, _, names in os.walk(folder.path) for name in names):
            with suppress(FileNotFoundError):  # removed in the meantime
                if not counts(path.relative_to(folder.path)) or not path.is_file():
                    continue
                found = path.stat()
                times = [found.st_mtime_ns, *([found.st_ctime_ns] if is_strict else [])]
                digest.update(json.dumps([str(path), found.st_size, *times]).encode())
    return digest.hexdigest()


class ChangedError(CkptkitError):
    """Files were written while they were read."""

    code = "changed"
    resumable = False


@contextmanager
def require_unchanged(folders: Iterable[Path], counts: Counts = lambda _: True) -> Iterator[None]:
    """Raises ChangedError if a file below these folders that `counts` changes during the block, also after an error."""
    watched = list(folders)
    before = fingerprint(watched, counts)
    try:
        yield
    except (OSError, CkptkitError) as error:
        _check(watched, counts, before, error)
        raise
    _check(watched, counts, before, None)


def _check(folders: Iterable[Path], counts: Counts, before: str, cause: Exception | None) -> None:
    if fingerprint(folders, counts) != before:
        paths = " or ".join(map(str, folders))
        raise ChangedError(f"{paths} changed while it was read", "run again when no program writes to it") from cause
