"""Reads and writes `ckptkit.json`: digests of tensors and side files, to prove a copy later, and their source.

Digests are BLAKE3 of the bytes of a tensor as it lies in memory (little-endian, row-major): nobody can make other
weights with the same digest. A manifest proves what it is kept apart from: whoever can change weights can write a new
manifest beside them.
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

SCHEMAS = "ckptkit-manifest/"  # the beginning of every one
SCHEMA = f"{SCHEMAS}2"
FINGERPRINT = "source_fingerprint"  # the key for paths, sizes and times of the files that a run read


@dataclass(frozen=True)
class Manifest:
    """The digests of a manifest: of tensors by name (Megatron's global ones), and of files relative to the root."""

    tensors: Mapping[str, TensorDigest]
    files: Mapping[str, str]


class _Digests:
    """A CheckpointWriter that only digests. Threads may share it."""

    def __init__(self) -> None:
        self.tensors: dict[str, TensorDigest] = {}

    def write(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = TensorDigest.of(tensor.contiguous())

    def finish(self) -> None:
        pass

    def discard(self) -> None:
        pass


def digests_of(checkpoint: Checkpoint, workers: int | None = None) -> dict[str, TensorDigest]:
    """Reads every tensor once, with `workers` threads (None: `ckptkit.transfer.copy.threads`)."""
    found = _Digests()
    copy(checkpoint, found, "digesting", workers)
    return {name: found.tensors[name] for name in checkpoint.specs}


def side_file_digests(location: Location, beside: Sequence[Path] = ()) -> dict[str, str]:
    """BLAKE3 of what belongs to a checkpoint besides its tensors, by path relative to its root.

    Of HF: config, tokenizer, templates, code. Of Megatron: the iteration's metadata, and `hf/` and the folders
    `beside`.
    """
    if location.is_hf:
        found = [location.path / relative for relative in side_files(location.path)]
    else:
        names = ("common.pt", ".metadata", "metadata.json")
        found = [location.path / name for name in names if (location.path / name).is_file()]
        for folder in (location.root / "hf", *beside):
            files = require_utf8(folder, files_below(folder, location.root))
            found += [folder / file for file in files if (folder / file).is_file()]
    return {str(path.relative_to(location.root)): file_digest(path) for path in found}


def loaded_files(location: Location) -> set[str]:
    """Files next to the weights that loaders read, relative to the root. Raises CkptkitError as `side_files`."""
    home = location.path if location.is_hf else location.root / "hf"
    names = side_files(home, location.root) if home.is_dir() else ()
    return {str((home / name).relative_to(location.root)) for name in names if is_loaded(name)}


def file_digest(path: Path) -> str:
    """BLAKE3 of a file beside weights in hexadecimal. Raises CkptkitError when it cannot be read, or is too large."""
    digest = blake3()
    for piece in pieces_of(path):
        digest.update(piece)
    return digest.hexdigest()


def lineage_of(location: Location) -> dict[str, str]:
    """What identifies a source: its own manifest where that has digests, else the headers of its files and their sizes.

    Headers tell releases apart, not whether weights were changed: for that, make a manifest of the source first.
    """
    manifest = location.root / MANIFEST
    if manifest.exists() and "tensors" in read_json(manifest):
        return {"source": printable(location.root.name), "digest_of": "manifest", "digest": file_digest(manifest)}
    digest = blake3()
    for path in sorted(
        [*location.path.glob("*.safetensors"), *location.path.glob("*.distcp"), *location.path.glob(".metadata")]
    ):
        digest.update(f"{path.name} {location.directory.size(path.name)}\n".encode())
        digest.update(_header(path))
    return {"source": printable(location.root.name), "digest_of": "headers", "digest": digest.hexdigest()}


def _header(path: Path) -> bytes:
    try:
        if path.suffix != ".safetensors":
            return read_regular(path, MAX_METADATA) if path.name == ".metadata" else b""
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            return file.read(min(length, MAX_HEADER))
    except OSError as error:
        raise CkptkitError(f"{path}: {error.strerror}", "copy it again") from error


def check_new_manifest(target: Path, checkpoint: str | Path) -> None:
    """Raises CkptkitError where a manifest of `checkpoint` may not be written, and for a name that loaders read."""
    if not target.parent.is_dir():
        raise CkptkitError(f"{target.parent} does not exist", "create it first")
    if target.name in LOADED:
        raise CkptkitError(f"{target} has a name that loaders read", "name the manifest otherwise")
    if target.exists():
        raise CkptkitError(
            f"{target} exists already, and no manifest is replaced",
            f"compare with it: `ckptkit verify {checkpoint} --manifest {target}`; or choose another --output",
        )


def has_identity(path: Path, asked: Mapping[str, Any]) -> bool:
    """Whether the run that wrote the manifest at `path` was asked for the same (`RunOptions.identity`)."""
    try:
        content = read_json(path)
    except CkptkitError:
        return False
    command = content.get("command")
    words = shlex.join(command) if isinstance(command, list) and all(isinstance(one, str) for one in command) else None
    return asked == {"version": content.get("version"), "command": words, "source": content.get(FINGERPRINT)}


def write_manifest(
    path: Path,
    command: Sequence[str],
    tensors: Mapping[str, TensorDigest],
    files: Mapping[str, str],
    more: Mapping[str, Any],
) -> None:
    """Writes the manifest of `tensors` and `files`. `more` are further keys: `source`, `hf_layout`, `lineage`."""
    digests = {name: one.to_json() for name, one in tensors.items()}
    content = {
        "schema": SCHEMA,
        "version": program_version(),
        "command": [printable(word) for word in command],
        **more,
        "files": files,
        "tensors": digests,
    }
    # One line a tensor: with indentation a model of 200,000 tensors would take a million lines.
    text = json.dumps(content | {"tensors": {}}, indent=1).removesuffix("{}\n}")
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in digests.items())
    write_atomically(path, f"{text}{{\n{lines}\n }}\n}}\n" if digests else json.dumps(content, indent=1) + "\n")


def read_manifest(path: Path) -> Manifest:
    """The digests of a manifest. Raises CkptkitError when it is none, or has none."""
    content = read_json(path)
    if content.get("schema") != SCHEMA:
        raise CkptkitError(
            f"{path} has schema {content.get('schema')!r}, not {SCHEMA!r}",
            "name a ckptkit.json, or what `ckptkit manifest` wrote",
        )
    tensors, files = content.get("tensors"), content.get("files")
    if not isinstance(tensors, dict) or not tensors or not isinstance(files, dict):
        raise CkptkitError(f"{path} has no digests", "make one of the sound checkpoint with `ckptkit manifest`")
    if wrong := next((name for name, one in files.items() if not is_blake3(one)), None):
        raise CkptkitError(f"{path}: the digest of {wrong} is not a BLAKE3", "take the manifest from where it was kept")
    found = {name: TensorDigest.parse(entry) for name, entry in tensors.items()}
    if wrong := next((name for name, digest in found.items() if digest is None), None):
        raise CkptkitError(
            f"{path}: the entry of {wrong} is not [dtype, shape, BLAKE3]", "take the manifest from where it was kept"
        )
    return Manifest({name: digest for name, digest in found.items() if digest is not None}, files)
