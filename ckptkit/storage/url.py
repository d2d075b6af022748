"""Lists, reads, uploads and removes files of a directory in a remote store: `s3://`, `gs://`, `hf://`, `az://`.

Credentials, endpoints and retries are configured in the store's fsspec library.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeGuard

from ckptkit.core.errors import CkptkitError, ErrorCode, UsageError, words_of
from ckptkit.core.printable import public_url

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_URL = re.compile(r"[a-z][a-z0-9+.-]*(::[a-z][a-z0-9+.-]*)*://", re.IGNORECASE)
_PART = 8 << 20  # bytes of one request, which are in memory twice
_AT_ONCE = 8  # concurrent requests of one thread
_ANSWER_S = 10  # for the first answer of a store: without an account, libraries retry for a minute
_UPLOAD_PART = 16 << 20  # S3 allows 10,000 parts per file

# Exceptions of file systems other than OSError, by module.
_RAISED = (
    ("aiohttp", "ClientError"),
    ("azure.core.exceptions", "AzureError"),
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("httpx", "HTTPError"),
    ("huggingface_hub.errors", "HFValidationError"),
)
_LOGIN = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, of an account with access",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
    "hf": "set HF_TOKEN, or run `hf auth login`, with an account that has access",
}
_OTHER_LOGIN = "set the credentials that its fsspec library requires"
_ENDPOINT = {"s3": "AWS_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST", "hf": "HF_ENDPOINT"}
_LIBRARY = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface-hub", "az": "adlfs"}
_ALIAS = {"s3a": "s3", "gcs": "gs", "abfs": "az"}
# The stores, and fsspec's memory. Other protocols open local files, follow references in files, or chain URLs.
_STORES = ("s3", "gs", "hf", "az", "memory")


def is_url(path: str | Path) -> TypeGuard[str]:
    """Whether this is a URL and not a local path."""
    return isinstance(path, str) and _URL.match(path) is not None


def refuse_credentials(url: str) -> None:
    """Raises UsageError for a URL with a user, a password or a secret in its query, which libraries could print."""
    if (public := public_url(url)) != url:
        login = _LOGIN.get(_scheme(url), _OTHER_LOGIN)
        raise UsageError(f"{public} contains credentials, which are not read", f"remove them, and {login}")


def path_or_url(path: str | Path) -> str | Path:
    """A URL unchanged, a local path or `file://` as Path. Raises UsageError like `refuse_credentials`."""
    refuse_credentials(str(path))
    return path if is_url(path) and not path.startswith("file://") else Path(str(path).removeprefix("file://"))


def absolute(path: str | Path) -> str:
    """A URL unchanged, or the absolute path of a local file."""
    place = path_or_url(path)
    return place if isinstance(place, str) else str(place.absolute())


class StoreError(CkptkitError):
    """A store did not answer correctly; its files may be sound."""

    code = "storage"


@dataclass(frozen=True)
class Store:
    """The directory at `url`. Every method raises StoreError for missing files, missing permissions or no connection.

    Raises CkptkitError for an unsupported store, for a chain of URLs, and like `refuse_credentials`.
    """

    url: str

    def __post_init__(self) -> None:
        refuse_credentials(self.url)
        if "::" in self.url:
            raise CkptkitError(f"{self.url} is a chain of URLs, which is not supported", "pass the URL of the store")
        if (scheme := _scheme(self.url)) not in _STORES:
            hint = "pass s3://, gs://, hf:// or az://, or download the checkpoint"
            raise CkptkitError(f"{self.url}: {scheme}:// is not a supported store", hint)

    @cached_property
    def _opened(self) -> tuple[AbstractFileSystem, str]:
        with _explained(self.url):
            filesystem, root = _open(self.url)
        return filesystem, root.rstrip("/")

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return PurePosixPath(self._opened[1]).name or "checkpoint"

    def overlaps(self, other: Store) -> bool:
        """Whether the two directories are equal or one contains the other, under any spelling of the URLs."""
        (filesystem, root), (other_filesystem, other_root) = self._opened, other._opened
        first, second = f"{root}/", f"{other_root}/"
        return filesystem == other_filesystem and (first.startswith(second) or second.startswith(first))

    def at(self, name: str) -> str:
        """The URL of a file, for people."""
        return f"{self.url.rstrip('/')}/{name}"

    def top(self) -> list[str]:
        """Names of the files and directories directly in the directory, without a cache."""
        filesystem, root = self._opened
        with _explained(self.url):
            filesystem.invalidate_cache()
            limit = {"timeout": _ANSWER_S} if filesystem.async_impl else {}
            try:
                found = filesystem.ls(root, detail=False, **limit)
            except FileNotFoundError:
                # Buckets have no directories: a missing one is empty. This also raises without a bucket.
                found = filesystem.find(root, **limit)
        return sorted(name for entry in found if (name := _below(root, entry)))

    def files(self) -> dict[str, dict[str, Any]]:
        """The store's metadata of each file below the directory, by relative name: `size` in bytes, and more."""
        filesystem, root = self._opened
        with _explained(self.url):
            filesystem.invalidate_cache()
            found: Mapping[str, dict[str, Any]] = filesystem.find(root, detail=True)
        # Some tools mark an empty directory by a key that ends with a slash.
        return {
            _below(root, path): entry
            for path, entry in sorted(found.items())
            if entry["type"] == "file" and not path.endswith("/")
        }

    def download(self, name: str, target: Path) -> None:
        """Copies a file to `target` in an existing directory."""
        filesystem, root = self._opened
        with _explained(self.at(name)):
            filesystem.get_file(f"{root}/{name}", str(target))

    def read(self, name: str, limit: int) -> bytes:
        """The content of a file of at most `limit` bytes. Raises CkptkitError for a larger one."""
        filesystem, root = self._opened
        with _explained(self.at(name)):
            size = int(filesystem.info(f"{root}/{name}")["size"])
            content: bytes = b"" if size > limit else filesystem.cat_file(f"{root}/{name}")
        if max(size, len(content)) > limit:
            message = f"{self.at(name)} has {max(size, len(content))} bytes, but ckptkit reads at most {limit}"
            raise CkptkitError(message, "upload the right file: this file is never so large in a checkpoint")
        return content

    def read_into(self, name: str, buffer: memoryview, offset: int) -> int:
        """Fills `buffer` with bytes of a file from `offset` on. Returns their number, fewer at the end of the file."""
        done = 0
        while done < len(buffer):
            stop = min(len(buffer), done + _PART * _AT_ONCE)
            starts = list(range(done, stop, _PART))
            ends = [min(start + _PART, stop) for start in starts]
            for start, end, content in zip(starts, ends, self._ranges(name, offset, starts, ends), strict=True):
                if len(content) > end - start:
                    message = f"{self.at(name)}: the store sends the complete file instead of the requested part"
                    raise CkptkitError(message, "download the checkpoint, and pass its directory")
                buffer[start : start + len(content)] = content
                if len(content) < end - start:
                    return start + len(content)
            done = stop
        return done

    def _ranges(self, name: str, offset: int, starts: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        filesystem, root = self._opened
        path = f"{root}/{name}"
        with _explained(self.at(name)):
            begins, stops = [offset + at for at in starts], [offset + at for at in ends]
            if filesystem.async_impl:
                parts: list[bytes] = filesystem.cat_ranges([path] * len(starts), begins, stops, on_error="raise")
                return parts
            # Without the cache of the file system, which would read more.
            ranges = zip(begins, stops, strict=True)
            return [filesystem.cat_file(path, start=one, end=two, cache_type="none") for one, two in ranges]

    def upload(self, file: Path, name: str) -> None:
        """Stores a local file, in parts if the store supports them; it is only visible when complete."""
        filesystem, root = self._opened
        protocols = [filesystem.protocol] if isinstance(filesystem.protocol, str) else filesystem.protocol
        parts = {"chunksize": _UPLOAD_PART, "max_concurrency": _AT_ONCE} if "s3" in protocols else {}
        with _explained(self.at(name)):
            filesystem.put_file(str(file), f"{root}/{name}", **parts)
            size = filesystem.info(f"{root}/{name}")["size"]
        if size != file.stat().st_size:
            message = f"{self.at(name)} has {size} bytes after an upload of {file.stat().st_size}"
            raise CkptkitError(message, "run again when no other program writes to it")

    def write(self, name: str, content: bytes) -> None:
        """Stores a small file."""
        filesystem, root = self._opened
        with _explained(self.at(name)):
            filesystem.pipe_file(f"{root}/{name}", content)

    def remove(self, names: Sequence[str]) -> None:
        """Removes files, and ignores missing ones."""
        filesystem, root = self._opened
        paths = [f"{root}/{name}" for name in sorted(self.files().keys() & set(names))]
        with _explained(self.url):
            if paths and filesystem.async_impl:
                filesystem.rm(paths)
                return
            # Some other file systems do not support lists.
            for path in paths:
                filesystem.rm_file(path)


def _open(url: str) -> tuple[AbstractFileSystem, str]:
    from fsspec.core import url_to_fs

    opened: tuple[AbstractFileSystem, str]
    if _scheme(url) != "gs":
        opened = url_to_fs(url)
        return opened
    logging.getLogger("gcsfs").addHandler(logging.NullHandler())  # it logs its last attempt with a traceback
    # By default it requests the account of a Google machine twice, the second time for 15 s.
    try:
        opened = url_to_fs(url, token="google_default")  # noqa: S106 - a source of tokens
    except _raised():
        if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
            raise
        opened = url_to_fs(url, token="anon")  # noqa: S106 - no token
    return opened


def _scheme(url: str) -> str:
    scheme = url.partition("://")[0].lower()
    return _ALIAS.get(scheme, scheme)


def _below(root: str, path: str) -> str:
    """The name of `path` relative to `root`, or empty for `root`. Raises CkptkitError for a key outside of it."""
    name = path.removeprefix(root).removeprefix("/").rstrip("/")
    if not path.startswith(root) or (name and {"", ".", ".."} & set(name.split("/"))):
        raise CkptkitError(f"{root} contains {path!r}, which is not a file of this directory", "rename it in the store")
    return name


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Converts exceptions of file systems and their libraries to StoreError, with the next step."""
    try:
        yield
    except _raised() as error:
        code: ErrorCode = "missing-dependency" if isinstance(error, ImportError) else "storage"
        unanswered = type(error).__name__ == "FSTimeoutError"  # it has no text
        words = f"no answer within {_ANSWER_S} s" if unanswered else words_of(error)
        raise StoreError(f"{url}: {words}", _next(url, error), code=code) from error


def _raised() -> tuple[type[Exception], ...]:
    """Exceptions of file systems, including those of `_RAISED` from imported libraries."""
    of_libraries = [getattr(sys.modules[module], name) for module, name in _RAISED if module in sys.modules]
    return (OSError, ValueError, ImportError, NotImplementedError, *of_libraries)


def _next(url: str, error: Exception) -> str:
    scheme = _scheme(url)
    if isinstance(error, ImportError):
        return f"pip install {_LIBRARY[scheme]}" if scheme in _LIBRARY else "install the packages in this message"
    if isinstance(error, NotImplementedError):
        return "use another store or a local directory: this kind of store does not support it"
    login = _LOGIN.get(scheme, _OTHER_LOGIN)
    if isinstance(error, PermissionError) or "credential" in f"{type(error).__name__} {error}".lower():
        return login
    if isinstance(error, FileNotFoundError):
        return "check the URL" + (f"; if the repository is private or gated, {login}" if scheme == "hf" else "")
    if type(error).__name__ == "OfflineModeIsEnabled":
        return "unset HF_HUB_OFFLINE, or pass a local directory"
    if isinstance(error, ValueError):
        return "check the URL: the part after :// is not valid for this store"
    endpoint = f", and {_ENDPOINT[scheme]} if it is set" if scheme in _ENDPOINT else ""
    account = f"; if it is not public, {login}" if isinstance(error, TimeoutError) else ""
    return f"check the network{endpoint}{account}; then run again"
