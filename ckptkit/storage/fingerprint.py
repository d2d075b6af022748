"""Tells whether files are those that were seen before, without reading them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

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
