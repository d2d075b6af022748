"""Reads and writes `ckptkit.json`: the source of a checkpoint, and digests of tensors and side files to prove a copy.

Digests are BLAKE3 of the bytes of a tensor in memory (little-endian, row-major). To detect manipulation, keep the
manifest separate from the checkpoint: anyone who can change weights can also write a new manifest.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.installation import program_version
from ckptkit.core.printable import printable
from ckptkit.formats.detect import LOADED, Location, is_loaded
from ckptkit.formats.hf.reader import read_json
from ckptkit.formats.hf.shard import MAX_HEADER
from ckptkit.formats.hf.side_files import MANIFEST, pieces_of, require_utf8, side_files
from ckptkit.formats.torch_dist.reader import MAX_METADATA
from ckptkit.storage.digest import TensorDigest, is_blake3
from ckptkit.storage.regular import open_regular, read_regular
from ckptkit.storage.tree import files_below
from ckptkit.storage.write import write_atomically
from ckptkit.transfer.copy import copy

if TYPE_CHECKING:
    from torch import Tensor

SCHEMAS = "ckptkit-manifest/"  # the start of every version
SCHEMA = f"{SCHEMAS}2"
FINGERPRINT = "source_fingerprint"  # the key for paths, sizes and times of a run's sources
_RESTORE = "restore the original manifest"


@dataclass(frozen=True)
class Manifest:
    """The digests of a manifest: of (global) tensors by name, and of files relative to the root."""

    tensors: Mapping[str, TensorDigest]
    files: Mapping[str, str]


class _Digests:
    """A CheckpointWriter that only computes digests; threads can share it."""

    def __init__(self) -> None:
        self.tensors: dict[str, TensorDigest] = {}

    def write(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = TensorDigest.of(tensor.contiguous())

    def finish(self) -> None:
        pass

    def discard(self) -> None:
        pass


def digests_of(checkpoint: Checkpoint, workers: int | None = None) -> dict[str, TensorDigest]:
    """Reads every tensor once, with `workers` threads (default: `ckptkit.transfer.copy.threads`)."""
    digests = _Digests()
    copy(checkpoint, digests, "digesting", workers)
    return {name: digests.tensors[name] for name in checkpoint.specs}


def side_file_digests(location: Location, folders: Sequence[Path] = ()) -> dict[str, str]:
    """BLAKE3 of side files by path relative to the checkpoint's root; for Megatron metadata, `hf/` and `folders`."""
    if location.kind == "hf":
        paths = [location.path / relative for relative in side_files(location.path)]
    else:
        names = ("common.pt", ".metadata", "metadata.json")
        paths = [location.path / name for name in names if (location.path / name).is_file()]
        for folder in (location.root / "hf", *folders):
            files = require_utf8(folder, files_below(folder, location.root))
            paths += [folder / file for file in files if (folder / file).is_file()]
    return {str(path.relative_to(location.root)): file_digest(path) for path in paths}


def loaded_files(location: Location) -> set[str]:
    """Side files that loaders read, relative to the root. Raises CkptkitError like `side_files`."""
    home = location.path if location.kind == "hf" else location.root / "hf"
    names = side_files(home, location.root) if home.is_dir() else ()
    return {str((home / name).relative_to(location.root)) for name in names if is_loaded(name)}


def file_digest(path: Path) -> str:
    """Hexadecimal BLAKE3 of a side file. Raises CkptkitError if it cannot be read or is too large."""
    digest = blake3()
    for piece in pieces_of(path):
        digest.update(piece)
    return digest.hexdigest()


def lineage_of(location: Location) -> dict[str, str]:
    """Identifies a source by its manifest if that has digests, else by the headers and sizes of its files.

    Headers distinguish releases, but do not show changed weights, unlike a manifest of the source.
    """
    manifest, source = location.root / MANIFEST, printable(location.root.name)
    if manifest.exists() and "tensors" in read_json(manifest):
        return {"source": source, "digest_of": "manifest", "digest": file_digest(manifest)}
    digest = blake3()
    for path in sorted(
        path for kind in ("*.safetensors", "*.distcp", ".metadata") for path in location.path.glob(kind)
    ):
        digest.update(f"{path.name} {location.directory.size(path.name)}\n".encode())
        digest.update(_header(path))
    return {"source": source, "digest_of": "headers", "digest": digest.hexdigest()}


def _header(path: Path) -> bytes:
    try:
        if path.suffix != ".safetensors":
            return read_regular(path, MAX_METADATA) if path.name == ".metadata" else b""
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            return file.read(min(length, MAX_HEADER))
    except OSError as error:
        raise CkptkitError(f"{path}: {error.strerror}", "copy this file again") from error


def check_new_manifest(target: Path, checkpoint: str | Path) -> None:
    """Raises CkptkitError if a manifest of `checkpoint` may not be written to `target`, or loaders read that name."""
    if not target.parent.is_dir():
        raise CkptkitError(f"{target.parent} does not exist", "create it first")
    if target.name in LOADED:
        raise CkptkitError(f"{target} would be loaded as part of the checkpoint", "choose another name")
    if target.exists():
        hint = f"run `ckptkit verify {checkpoint} --manifest {target}` to compare, or choose another --output"
        raise CkptkitError(f"{target} exists already, but manifests are never replaced", hint)


def has_identity(path: Path, identity: Mapping[str, Any]) -> bool:
    """Whether the run that wrote the manifest at `path` had the same `RunOptions.identity`."""
    try:
        content = read_json(path)
    except CkptkitError:
        return False
    command = content.get("command")
    words = shlex.join(command) if isinstance(command, list) and all(isinstance(one, str) for one in command) else None
    return identity == {"version": content.get("version"), "command": words, "source": content.get(FINGERPRINT)}


def write_manifest(
    path: Path,
    command: Sequence[str],
    tensors: Mapping[str, TensorDigest],
    files: Mapping[str, str],
    more: Mapping[str, Any],
) -> None:
    """Writes the manifest of `tensors` and `files`. `more`: additional keys (`source`, `hf_layout`, `lineage`)."""
    digests = {name: one.to_json() for name, one in tensors.items()}
    start = {"schema": SCHEMA, "version": program_version(), "command": [printable(word) for word in command]}
    content = {**start, **more, "files": files, "tensors": digests}
    # One line per tensor: with indentation, 200,000 tensors would take a million lines.
    text = json.dumps(content | {"tensors": {}}, indent=1).removesuffix("{}\n}")
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in digests.items())
    write_atomically(path, f"{text}{{\n{lines}\n }}\n}}\n" if digests else json.dumps(content, indent=1) + "\n")


def read_manifest(path: Path) -> Manifest:
    """The digests of a manifest. Raises CkptkitError for another file or one without digests."""
    content = read_json(path)
    if content.get("schema") != SCHEMA:
        message = f"{path} has schema {content.get('schema')!r}, not {SCHEMA!r}"
        raise CkptkitError(message, "pass a ckptkit.json, or the output of `ckptkit manifest`")
    tensors, files = content.get("tensors"), content.get("files")
    if not isinstance(tensors, dict) or not tensors or not isinstance(files, dict):
        raise CkptkitError(f"{path} has no digests", "run `ckptkit manifest` on the sound checkpoint")
    if wrong := next((name for name, one in files.items() if not is_blake3(one)), None):
        raise CkptkitError(f"{path}: the digest of {wrong} is not a BLAKE3", _RESTORE)
    found = {name: TensorDigest.parse(entry) for name, entry in tensors.items()}
    if wrong := next((name for name, digest in found.items() if digest is None), None):
        raise CkptkitError(f"{path}: the entry of {wrong} is not [dtype, shape, BLAKE3]", _RESTORE)
    return Manifest({name: digest for name, digest in found.items() if digest is not None}, files)
