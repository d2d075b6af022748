"""Uploads an HF directory to a URL: finished shards at once, config.json and the index last."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from ckptkit.core.errors import CkptkitError, DamagedError
from ckptkit.core.json_text import MAX_BYTES
from ckptkit.formats.files import Digests
from ckptkit.formats.hf.reader import INDEX, SINGLE, parse_json
from ckptkit.formats.hf.remote import fetch_header
from ckptkit.formats.hf.shard import scan_shard
from ckptkit.formats.hf.side_files import is_hidden
from ckptkit.storage.directory import RemoteFile
from ckptkit.storage.url import Store, is_url
from ckptkit.transfer.journal import Journal, Measured
from ckptkit.transfer.replacement import require_checkpoint

# Without these, shards are not a model: uploaded last, in this order, and removed first.
_LAST = ("config.json", INDEX)
_PARTIAL = ".ckptkit-partial"


class Upload:
    """Uploads the files of an HF directory to `url`; threads can share it.

    Stores cannot rename, so files get their final names; `config.json` and the index are uploaded by `finish`. Raises
    CkptkitError like `check_upload`, and if `url` is not writable.
    """

    def __init__(self, url: str, overwrite: bool = False, sources: Iterable[str | Path | None] = ()) -> None:
        self._old = [name for name in check_upload(url, overwrite, sources) if name != _PARTIAL]
        self._store = Store(url)
        self._lock = threading.Lock()
        self._replaced = False
        self._uploaded = [_PARTIAL]
        self._held: dict[str, bytes] = {}
        self._store.write(_PARTIAL, b"\n")

    def put(self, file: Path, name: str) -> None:
        """Uploads a complete local file as `name`, relative to the URL; it may be removed afterwards."""
        if name in _LAST:
            self._held[name] = file.read_bytes()
            return
        with self._lock:
            self._remove_old()
            self._uploaded.append(name)
        self._store.upload(file, name)

    def finish(self) -> None:
        """Completes the checkpoint. Raises CkptkitError without a config.json."""
        if "config.json" not in self._held:
            raise CkptkitError(f"{self._store.url}: config.json was not uploaded", "upload every file of the directory")
        self._remove_old()
        for name in filter(self._held.__contains__, _LAST):
            self._uploaded.append(name)
            self._store.write(name, self._held[name])
        self._store.remove([_PARTIAL])

    def discard(self) -> str:
        """Removes the uploaded files, the index first, if the store can be reached. Returns a description."""
        # The error of this removal is less important than the original one; _PARTIAL marks remaining files.
        try:
            _remove(self._store, self._uploaded)
        except CkptkitError:
            return f"{self._store.url} may still have files of this upload: pass --overwrite to replace them"
        return f"the old files at {self._store.url} have been removed" if self._replaced else "nothing was left behind"

    def _remove_old(self) -> None:
        old, self._old = self._old, []
        self._replaced |= bool(old)
        _remove(self._store, old)


class _Uploading(Journal):
    """A journal that uploads complete files, and removes the local ones."""

    def __init__(self, root: Path, upload: Upload) -> None:
        super().__init__(root)
        self._upload = upload

    def record(self, file: str, digests: Digests, measured: Measured | None = None) -> None:
        self._upload.put(self._root / file, file)
        (self._root / file).unlink()
        super().record(file, digests, measured)


@contextmanager
def new_upload(
    url: str, *, overwrite: bool = False, sources: Iterable[str | Path | None] = ()
) -> Iterator[tuple[Path, Journal]]:
    """A temporary directory that becomes the HF directory at `url` after the block, and its journal.

    A recorded file is uploaded and removed at once, the others at the end. After an error the uploaded files are
    removed. Raises CkptkitError like `Upload`, and if the local disk is full.
    """
    with tempfile.TemporaryDirectory(prefix="ckptkit-") as folder:
        root, upload = Path(folder), Upload(url, overwrite, sources)
        try:
            journal = _Uploading(root, upload)
            journal.begin({})
            yield root, journal
            for path in sorted(root.rglob("*")):
                if path.is_file() and not is_hidden(name := str(path.relative_to(root))):
                    upload.put(path, name)
            upload.finish()
        except BaseException as error:
            result = upload.discard()
            if isinstance(error, OSError):
                hint = f"free space in {tempfile.gettempdir()}, where files are before the upload, or set TMPDIR"
                raise CkptkitError(f"writing {url}: {error}", f"{hint}; {result}") from error
            error.add_note(result)
            raise


def check_upload(url: str, overwrite: bool, sources: Iterable[str | Path | None] = ()) -> list[str]:
    """The files at `url` that will be replaced. Raises CkptkitError for existing files without `overwrite`.

    Only a checkpoint or an unfinished upload is replaced, and never one of `sources` or anything around or inside them.
    """
    store = Store(url)
    for source in sources:
        if source is not None and is_url(source) and store.overlaps(Store(source)):
            raise CkptkitError(f"{url} overlaps the source {source}", "choose a destination outside of it")
    sizes = {name: int(entry["size"]) for name, entry in store.files().items()} if store.top() else {}
    if sizes and not overwrite:
        why = "holds an unfinished upload, which may still be running" if _PARTIAL in sizes else "exists already"
        raise CkptkitError(f"{url} {why}", "choose another destination, or pass --overwrite to replace it")
    if sizes and _PARTIAL not in sizes:
        require_checkpoint(url, sizes, _Stored(store, sizes))
    return list(sizes)


@dataclass(frozen=True)
class _Stored:
    """The files at a URL, by name with their sizes in bytes."""

    store: Store
    sizes: Mapping[str, int]

    def json(self, name: str) -> Mapping[str, Any]:
        if name not in self.sizes:
            return {}
        try:
            return parse_json(self.store.read(name, MAX_BYTES), self.store.at(name))
        except DamagedError:
            return {}

    def digest(self, name: str) -> str | None:
        return blake3(self.store.read(name, MAX_BYTES)).hexdigest()

    def fault(self, name: str) -> str | None:
        if not name.endswith(".safetensors"):
            return f"{name} is not safetensors, the only weights that ckptkit checks at URLs"
        with tempfile.TemporaryDirectory(prefix="ckptkit-") as folder:
            header = Path(folder) / "header"
            fetch_header(self.store, name, self.sizes[name], header)
            found = scan_shard(header, RemoteFile(self.store.url, name, self.sizes[name]))
        return None if found.specs else f"{name} has no safetensors header"


def _remove(store: Store, names: Iterable[str]) -> None:
    """Removes files, the index and config.json first."""
    files = list(dict.fromkeys(names))
    first = [name for name in (INDEX, SINGLE, "config.json") if name in files]
    last = [_PARTIAL] * (_PARTIAL in files)
    for some in (first, [name for name in files if name not in first + last], last):
        if some:
            store.remove(some)
