"""Opens an HF directory at a URL: copies small files to this machine, and reads tensors from the URL on demand."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError, DamagedError, MissingError
from ckptkit.core.json_text import MAX_BYTES
from ckptkit.core.specs import summarize
from ckptkit.formats.detect import ITERATION, LEGACY_RANK, LOADED, TRACKER, require_own_files
from ckptkit.formats.hf.reader import INDEX, parse_json, read_json
from ckptkit.formats.hf.shard import MAX_HEADER
from ckptkit.formats.hf.side_files import MAX_SIDE_FILE_BYTES, is_hidden, is_weight
from ckptkit.storage.directory import Directory, Listing
from ckptkit.storage.fingerprint import ChangedError
from ckptkit.storage.url import Store, is_url

CONFIG = "config.json"
_AT_ONCE = 16  # concurrent files: most of the time is latency


@contextmanager
def open_directory(path: str | Path) -> Iterator[Directory]:
    """The directory at a local path; for a URL, a temporary copy of the HF directory without tensors.

    Copies config, tokenizer, templates, code and the headers of shards; `HfCheckpoint` reads tensors from the URL.
    Raises CkptkitError if there is no HF directory.
    """
    if not is_url(path):
        yield Directory(Path(path))
        return
    store = Store(path)
    with tempfile.TemporaryDirectory(prefix="ckptkit-") as folder:
        root = Path(folder) / store.name
        root.mkdir()
        yield Directory(root, _fetch(store, root))


def config_at(path: str | Path) -> dict[str, Any] | None:
    """The config.json at a path or URL, or None. Raises CkptkitError like `read_json` and `Store`."""
    if not is_url(path):
        require_own_files(path)
        return read_json(Path(path) / CONFIG) if (Path(path) / CONFIG).exists() else None
    store = Store(path)
    return parse_json(store.read(CONFIG, MAX_BYTES), store.at(CONFIG)) if CONFIG in store.top() else None


def check_unchanged(source: Directory) -> None:
    """Raises ChangedError if a file at a URL was written since it was opened."""
    before = source.remote
    if before is None:
        return
    after = Listing.of(Store(before.url)).versions
    if changed := [name for name in sorted({*before.versions, *after}) if before.versions.get(name) != after.get(name)]:
        message = f"{before.url} changed while it was read: {summarize(changed)}"
        raise ChangedError(message, "run again when no program writes to this URL")


def _fetch(store: Store, root: Path) -> Listing:
    """Downloads small files and the headers of shards into `root`. Returns the listing of the store."""
    _check_kind(store)
    listing = Listing.of(store)
    visible = [name for name in listing.sizes if not is_hidden(name)]
    small = [name for name in visible if not is_weight(name) or name == INDEX]
    weights = [name for name in visible if is_weight(name) and name != INDEX and "/" not in name]
    for name in small:
        limit = MAX_BYTES if name in LOADED else MAX_SIDE_FILE_BYTES
        if listing.sizes[name] > limit:
            message = f"{store.at(name)} has {listing.sizes[name]} bytes, but ckptkit reads at most {limit}"
            raise CkptkitError(message, "upload the file of the release")
        (root / name).parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_AT_ONCE, "ckptkit-open") as pool:
        tasks = [pool.submit(store.download, name, root / name) for name in small]
        tasks += [pool.submit(fetch_header, store, name, listing.sizes[name], root / name) for name in weights]
        try:
            for task in tasks:
                task.result()
        finally:
            pool.shutdown(cancel_futures=True)
    return listing


def _check_kind(store: Store) -> None:
    """Raises CkptkitError unless this is an HF directory, before its folders are listed."""
    top = store.top()
    if not top:
        raise MissingError(f"{store.url} is empty", "check the URL; pass the directory that contains config.json")
    is_iteration = any(ITERATION.fullmatch(name) or LEGACY_RANK.fullmatch(name) for name in top)
    if is_iteration or {TRACKER, ".metadata"} & set(top):
        message = f"{store.url} is a Megatron checkpoint, but only HF directories are read from URLs"
        raise CkptkitError(message, "copy it to a local disk first")
    if CONFIG not in top:
        message = f"{store.url} has no config.json, only {summarize(top)}"
        raise MissingError(message, "pass the directory of an HF checkpoint")


def fetch_header(store: Store, name: str, size: int, target: Path) -> None:
    """Writes the header of a safetensors file to `target`, or an empty file for another format."""
    content = b""
    if name.endswith(".safetensors"):
        content = _read(store, name, 0, min(8, size))
        length = int.from_bytes(content, "little")
        # The reader of the header rejects an invalid length.
        content += _read(store, name, 8, length) if length <= min(size - 8, MAX_HEADER) else b""
    target.write_bytes(content)


def _read(store: Store, name: str, offset: int, count: int) -> bytes:
    buffer = bytearray(count)
    if store.read_into(name, memoryview(buffer), offset) != count:
        raise DamagedError(f"{store.at(name)} ends within its header", "upload this file again")
    return bytes(buffer)
