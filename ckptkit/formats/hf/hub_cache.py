"""Finds models (`ORG/NAME`) and recorded hashes of files in the local cache of the hub's client; needs no network."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.reader import INDEX, read_json
from ckptkit.storage.links import snapshot_of
from ckptkit.storage.regular import read_regular
from ckptkit.storage.tree import files_below

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_OFFLINE, _TRUE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), frozenset({"1", "ON", "YES", "TRUE"})
_MODEL = "ORG/NAME"
_MAX_METADATA = 4096  # bytes of a file of three short lines
_END_OF_TIME = 4e9  # seconds since 1970, some hundred years
_MAX_LINKS = 8  # from a file to its blob there are one or two


@dataclass(frozen=True)
class HubModel:
    """A name on a hub: its snapshot in the local cache, or None if the trainer downloads some of it, and the reason.

    If downloads are forbidden, the trainer uses the snapshot even if it is incomplete or missing.
    """

    name: str
    path: Path | None
    why: str


def hub_model(text: str, environment: Mapping[str, str]) -> HubModel | None:
    """The model of that name in this trainer's cache, or None for an existing directory or any other text."""
    if not _NAME.fullmatch(text) or Path(text).exists():
        return None
    # This import takes half a second, and most launches name directories.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    cache = hub_cache(environment)
    try:
        found = try_to_load_from_cache(text, "config.json", cache_dir=cache)
    except HFValidationError:
        return None  # the trainer rejects it too
    forbidden = next((name for name in _OFFLINE if environment.get(name, "").upper() in _TRUE), None)
    if not isinstance(found, str) or not Path(found).exists():
        if forbidden:
            folder = cache / f"models--{text.replace('/', '--')}"
            return HubModel(text, folder, f"{text}, which is not in {cache}, and {forbidden} forbids a download")
        return HubModel(text, None, f"not in {cache}, so the trainer downloads it; not checked")
    snapshot = Path(found).parent
    if not forbidden and not _is_complete(snapshot):
        return HubModel(text, None, f"only partly in {cache}, so the trainer downloads the rest; not checked")
    return HubModel(text, snapshot, f"{text} in the local hub cache")


def hub_cache(environment: Mapping[str, str]) -> Path:
    """The directory of the cache. Source: huggingface_hub `constants.py`."""
    home = environment.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    home = environment.get("HF_HOME") or os.path.join(home, "huggingface")
    cache = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(cache)))


def _is_complete(snapshot: Path) -> bool:
    """Whether a snapshot has the weights in its index, or any file of weights without an index."""
    try:
        index = read_json(snapshot / INDEX) if (snapshot / INDEX).exists() else {}
    except CkptkitError:
        return True  # a check of headers reports the damaged index
    weights = index.get("weight_map")
    names = set(map(str, weights.values())) if isinstance(weights, dict) else set()
    return all((snapshot / name).exists() for name in names) and any(snapshot.glob("*.safetensors"))


@dataclass(frozen=True)
class Download:
    """The record of the hub's client of a downloaded file."""

    digest: str  # hexadecimal: the SHA-256 of a large file, the SHA-1 of git's blob of a small one
    record: Path  # the file with the digest: a blob of the cache, or metadata next to the downloaded file
    time: float  # of the download, in seconds since 1970; a newer file was changed or replaced
    origin: str  # the model, if known, and its revision
    fetch: str  # the command to download it again


def downloads_in(root: Path) -> dict[str, Download]:
    """The files of an HF directory with a hash recorded by the hub's client, by relative name.

    In its cache, files are links to blobs, named by hashes. `hf download --local-dir` writes metadata below
    `.cache/huggingface/download`. Invalid records are ignored, like by the client.
    Source: huggingface_hub `file_download.py` and `_local_folder.py`.
    """
    files = (name for name in map(str, files_below(root)) if (root / name).is_file())
    return {name: one for name in files if (one := _cached(root, name) or _local(root, name)) is not None}


def _cached(root: Path, name: str) -> Download | None:
    """The record of a link to a blob, which may be a link into a store shared by models."""
    link = root / name
    for _ in range(_MAX_LINKS):
        if not link.is_symlink():
            return None
        target = Path(os.path.realpath(link.parent), os.readlink(link))
        link = Path(os.path.realpath(target.parent), target.name)
        if link.parent.name == "blobs" and _DIGEST.fullmatch(link.name):
            model, revision = snapshot_of(Path(os.path.realpath(root))) or (_MODEL, "REVISION")
            fetch = ["hf", "download", model, name, "--revision", revision, "--force-download"]
            origin = f"{model} at {revision}"
            return Download(link.name, link, (root / name).lstat().st_mtime, origin, shlex.join(fetch))
    return None


def _local(root: Path, name: str) -> Download | None:
    """The record in the metadata of a download with --local-dir: lines with commit, hash and time."""
    record = root / ".cache" / "huggingface" / "download" / f"{name}.metadata"
    try:
        lines = read_regular(record, _MAX_METADATA).decode().splitlines()
        commit, digest, time = lines[0].strip(), lines[1].strip(), float(lines[2])
    except (OSError, ValueError, IndexError):
        return None
    if not (_DIGEST.fullmatch(digest) and _DIGEST.fullmatch(commit) and 0 < time < _END_OF_TIME):
        return None
    fetch = ["hf", "download", _MODEL, name, "--revision", commit, "--local-dir", str(root), "--force-download"]
    return Download(digest, record, time, f"revision {commit}", shlex.join(fetch))
