"""Weight updates that trainers publish as deltas: their faults, and their application to a base.

A version `weight_vNNNNNN` is a full HF checkpoint, or a delta against the previous version: safetensors files with an
encoded change (uint8) per changed tensor, and in `__metadata__` a checksum of its new bytes; and an index with
`version`, `base_version`, `delta_encoding`, `compression_format` and `checksum_format` in its `metadata`. Version 0 is
the initial checkpoint of the training. Engines read every safetensors file, even if the index does not list it.
Source: `_write_delta_files` of slime 624b824a, miles 31f1ca96 and vime 03a8e1bf.

Both encodings apply to bytes of any dtype; each is one zstd frame. `xor`: the old bytes XOR the new ones. `overwrite`:
the number of changed bytes and their positions, all uint32 little-endian, then their new values. Source: slime
624b824a, `diff_and_compress` and `overwrite_encode`, and `_apply_delta` of its patch of SGLang.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from ckptkit.core.errors import CkptkitError, DamagedError, UnsupportedError, UsageError, words_of
from ckptkit.core.plan import Plan, Step, View, identity
from ckptkit.core.printable import shortened
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.detect import VERSION
from ckptkit.formats.hf.reader import INDEX, HfCheckpoint, read_json
from ckptkit.formats.hf.shard import Fault, Shard, scan_shard, unreadable
from ckptkit.storage.buffers import bytes_of
from ckptkit.storage.directory import Directory
from ckptkit.storage.links import why_unreadable

if TYPE_CHECKING:
    from torch import Tensor
    from zstandard import ZstdDecompressionReader


Bytes = NDArray[np.uint8]

_PIECE = 4 << 20  # bytes, or positions, to decode at a time
_WRONG = "copy this version again: the file was changed or truncated, or the tensor differs from the writer's"
# Hexadecimal checksums of the bytes of a tensor.
CHECKSUMS: dict[str, Callable[[memoryview], str]] = {
    "xxh3-128": lambda content: import_module("xxhash").xxh3_128_hexdigest(content),
    "blake3": lambda content: blake3(content).hexdigest(),
    "adler32": lambda content: f"{zlib.adler32(content):08x}",
}


def apply(encoding: str, payload: Bytes, state: Bytes) -> int:
    """Changes the bytes of a tensor in place by one of ENCODINGS. Returns the number of changed bytes.

    Raises DamagedError for an invalid payload or one for a different number of bytes; `state` is then undefined.
    """
    import zstandard

    try:
        return ENCODINGS[encoding](payload, state)
    except zstandard.ZstdError as error:
        raise DamagedError(f"its payload is not complete zstd data ({words_of(error)})", _WRONG) from error


def _xor(payload: Bytes, state: Bytes) -> int:
    changed, at, stream = 0, 0, _decoded(payload)
    while len(piece := _next(stream, _PIECE)):
        if at + len(piece) > len(state):
            break
        changed += int(np.count_nonzero(piece))
        state[at : at + len(piece)] ^= piece
        at += len(piece)
    if len(piece) or at != len(state):
        size = f"{at}" if not len(piece) else f"{at + len(piece)} or more"
        raise DamagedError(f"its payload is for {size} bytes, but the tensor has {len(state)}", _WRONG)
    return changed


def _overwrite(payload: Bytes, state: Bytes) -> int:
    positions, values = _decoded(payload), _decoded(payload)
    head = _next(positions, 4)
    count = int.from_bytes(head.tobytes(), "little") if len(head) == 4 else 0
    if not 0 < count <= len(state):
        raise DamagedError(f"its payload is for {count} changed bytes, but the tensor has {len(state)}", _WRONG)
    left = 4 + 4 * count
    while left and (skipped := len(_next(values, min(left, _PIECE)))):
        left -= skipped
    changed, last = 0, -1
    for begin in range(0, count, _PIECE):
        size = min(_PIECE, count - begin)
        raw, new = _next(positions, 4 * size), _next(values, size)
        if len(raw) != 4 * size or len(new) != size:
            raise DamagedError(f"its payload ends before the last of {count} changed bytes", _WRONG)
        at = raw.view("<u4").astype(np.int64)
        if int(at.max()) >= len(state):
            raise DamagedError(f"its payload changes byte {int(at.max())} of a tensor of {len(state)} bytes", _WRONG)
        if int(np.diff(at, prepend=last).min()) <= 0:
            raise DamagedError("its payload has positions in the wrong order", _WRONG)
        changed, last = changed + int(np.count_nonzero(state[at] != new)), int(at[-1])
        state[at] = new
    if len(_next(values, 1)):
        raise DamagedError(f"its payload continues after the last of {count} changed bytes", _WRONG)
    return changed


ENCODINGS: dict[str, Callable[[Bytes, Bytes], int]] = {"xor": _xor, "overwrite": _overwrite}


def _decoded(payload: Bytes) -> ZstdDecompressionReader:
    import zstandard

    return zstandard.ZstdDecompressor().stream_reader(payload.data)


def _next(stream: ZstdDecompressionReader, size: int) -> Bytes:
    parts, missing = [], size
    while missing and (part := stream.read(missing)):
        parts.append(part)
        missing -= len(part)
    return np.frombuffer(b"".join(parts), np.uint8)


FileFault = tuple[Path, Fault]

_AGAIN = "copy this version again from the trainer's output; if the fault is there too, publish a full checkpoint"
_CUT = "copy this version again, or use an earlier one: the trainer was stopped, or the copy is incomplete"


@dataclass(frozen=True)
class Version:
    """One published version, sound or not."""

    number: int
    path: Path

    @cached_property
    def index(self) -> Mapping[str, Any]:
        """The index. Raises CkptkitError if it cannot be read, and UnsupportedError for another kind of delta."""
        if not (self.path / INDEX).exists() and (self.path / "manifest.json").exists():
            hint = "publish with the CPU encoder, or publish a full checkpoint"
            raise UnsupportedError(f"{self.path} has deltas of miles' GPU encoder (manifest.json)", hint)
        return read_json(self.path / INDEX)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The index's `metadata`, or empty if there is none."""
        metadata = self.index.get("metadata")
        return metadata if isinstance(metadata, dict) else {}

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The headers of all safetensors files, sound or not, in the engines' reading order."""
        return tuple(map(_scan, sorted(self.path.glob("*.safetensors"))))


def _scan(path: Path) -> Shard:
    try:
        return scan_shard(path)
    except OSError as error:
        return unreadable(path, why_unreadable(path, error))


@dataclass(frozen=True)
class Chain:
    """The versions of a directory up to `target`. `start`: the newest full one, or 0 if the base is elsewhere."""

    root: Path
    target: int
    versions: Mapping[int, Version]
    start: int

    @property
    def full(self) -> Path | None:
        """The newest full version."""
        return self.versions[self.start].path if self.start in self.versions else None

    @property
    def deltas(self) -> list[Version]:
        """The versions after `start`, in order."""
        return [self.versions[number] for number in sorted(self.versions) if number > self.start]


def chain_at(path: Path) -> Chain:
    """The versions in a directory, or up to the one at `path`. Raises CkptkitError if there are none."""
    own = VERSION.fullmatch(path.name)
    root = path.parent if own else path
    found = {int(match[1]): root / match[0] for entry in root.iterdir() if (match := VERSION.fullmatch(entry.name))}
    target = int(own[1]) if own else max(found, default=0)
    if not found:
        raise CkptkitError(f"{path} has no published version", "pass the directory with weight_v000001 and so on")
    versions = {number: Version(number, at) for number, at in found.items() if number <= target}
    start = max((number for number, one in versions.items() if (one.path / "config.json").exists()), default=0)
    return Chain(root, target, versions, start)


def single_delta(path: Path) -> Chain:
    """A chain of only this delta. Raises CkptkitError if its directory does not have the name of a version."""
    match = VERSION.fullmatch(path.name)
    if match is None:
        raise CkptkitError(f"{path} is not named like a version", "rename it to weight_v and its number")
    number = int(match[1])
    return Chain(path.parent, number, {number: Version(number, path)}, number - 1)


def require_sound(chain: Chain, specs: Mapping[str, TensorSpec]) -> None:
    """Raises DamagedError for the first fault in headers. `specs`: the tensors of the base."""
    for path, fault in (*order_faults(chain), *file_faults(chain, specs)):
        raise DamagedError(f"{path}: {fault}", fault.hint or _AGAIN)


def order_faults(chain: Chain) -> Iterator[FileFault]:
    """Missing versions, versions that differ from the directory's number, and unknown encodings."""
    for number in range(chain.start + 1, chain.target + 1):
        if number not in chain.versions:
            hint = "restore this version, or start from a full checkpoint of a later one"
            yield chain.root / f"weight_v{number:06d}", Fault(f"version {number}", "this version is missing", hint=hint)
    for one in chain.deltas:
        try:
            metadata = one.metadata
        except UnsupportedError:
            raise
        except CkptkitError as error:
            yield one.path / INDEX, Fault("the index, which is published last", error.message, hint=_CUT)
            continue
        yield from ((one.path / INDEX, fault) for fault in _metadata_faults(one.number, metadata))


def _metadata_faults(number: int, metadata: Mapping[str, Any]) -> Iterator[Fault]:
    order = {"version": number, "base_version": number - 1}
    if any(not str(metadata.get(key)).isdecimal() or int(metadata[key]) != true for key, true in order.items()):
        actual = ", ".join(f"{key} {shortened(metadata.get(key))}" for key in order)
        hint = "restore the file that the trainer published: this one belongs to another version or run"
        yield Fault(f"version {number}, based on {number - 1}", actual, hint=hint)
    known = {"delta_encoding": ENCODINGS, "compression_format": ("zstd",), "checksum_format": CHECKSUMS}
    for key, values in known.items():
        if metadata.get(key) not in values:
            yield Fault(f"{key} of {', '.join(values)}", shortened(metadata.get(key)), hint="publish with one of these")


def file_faults(chain: Chain, specs: Mapping[str, TensorSpec] | None) -> Iterator[FileFault]:
    """Faults of files, and of tensors compared with `specs` of the base, if known."""
    for one in chain.deltas:
        for shard in one.shards:
            yield from ((shard.path, fault) for fault in (*shard.faults, *_tensor_faults(shard, specs)))
        yield from _index_faults(one)


def _tensor_faults(shard: Shard, specs: Mapping[str, TensorSpec] | None) -> Iterator[Fault]:
    for name, spec in shard.specs.items():
        if specs is not None and name not in specs:
            hint = "pass the --hf-checkpoint of this run: the delta is of another model or has other names"
            yield Fault("a tensor of the base", "the base has no tensor of this name", name, hint)
        if spec.dtype != "uint8" or len(spec.shape) != 1:
            yield Fault("encoded bytes, uint8 [bytes]", f"{spec.dtype} {list(spec.shape)}", name, _AGAIN)
        if name not in shard.metadata:
            yield Fault("a checksum of the new bytes in __metadata__", "none", name, _AGAIN)


def _index_faults(one: Version) -> Iterator[FileFault]:
    index, listed = one.path / INDEX, one.index.get("weight_map")
    if not isinstance(listed, dict):
        yield index, Fault("a weight_map of names to files", shortened(listed), hint=_AGAIN)
        return
    stored = {name: shard.path.name for shard in one.shards for name in shard.specs}
    closed = {shard.path.name for shard in one.shards if not shard.readable}
    for name, file in listed.items():
        if name not in stored and file not in closed:
            actual = "no file contains it" if (one.path / str(file)).exists() else f"{shortened(file)} is missing"
            yield index, Fault("each listed tensor in a file", actual, name, "engines would apply a part: " + _AGAIN)
    for name in stored.keys() - listed.keys():
        yield index, Fault("every tensor that is stored", f"{stored[name]} has an unlisted tensor", name, _AGAIN)
    times = Counter(name for shard in one.shards for name in shard.specs)
    for name in (name for name, count in times.items() if count > 1):
        hint = "publish each tensor once: a second XOR undoes the first (for example, embeddings of two stages)"
        yield index, Fault("each tensor once", f"{times[name]} files contain it", name, hint)


@dataclass(frozen=True)
class Patch:
    """The change of a tensor from one version to the next."""

    name: str
    version: Version
    shard: Shard

    def apply(self, tensor: Tensor) -> int:
        """Changes a tensor in place. Returns how many bytes changed. Raises DamagedError, also for a wrong base."""
        metadata, where = self.version.metadata, f"{self.shard.path}: {self.name}"
        state = np.frombuffer(bytes_of(tensor), np.uint8)
        payload = np.frombuffer(bytes_of(self.shard.read(self.name)), np.uint8)
        try:
            changed = apply(metadata["delta_encoding"], payload, state)
        except DamagedError as error:
            raise DamagedError(f"{where}: {error.message}", error.hint) from error
        actual, expected = CHECKSUMS[metadata["checksum_format"]](state.data), self.shard.metadata[self.name]
        if actual != expected:
            hint = "pass the base of this run, or copy this version again: it was made for other bytes"
            raise DamagedError(f"{where}: the new bytes have checksum {actual}, but the writer's had {expected}", hint)
        return changed


def base_of(chain: Chain, hf: str | Path | Directory | None) -> HfCheckpoint:
    """The newest full version, or else the checkpoint `hf`. Raises UsageError without either."""
    base = chain.full or hf
    if base is None:
        hint = "pass the --hf-checkpoint of the run that published the deltas (--hf, or --source of `verify`)"
        raise UsageError(f"{chain.root} has deltas without their base", hint)
    return HfCheckpoint(base)


def patches_of(chain: Chain) -> Mapping[str, Sequence[Patch]]:
    """The changes of each tensor, in order, without a check for faults."""
    found: dict[str, list[Patch]] = {}
    for one in chain.deltas:
        for shard in one.shards:
            for name in shard.specs:
                found.setdefault(name, []).append(Patch(name, one, shard))
    return found


def open_deltas(path: Path, base: str | Path | Directory | None) -> View:
    """The version at `path`, or the newest in that directory. Raises CkptkitError for faults in headers."""
    chain = chain_at(path)
    source = base_of(chain, base)
    require_sound(chain, source.specs)
    patches = patches_of(chain)
    steps = tuple(_step(source, name, patches.get(name, ())) for names in source.groups for name in names)
    return View(source, Plan(steps, source.specs, where=str(source.root), config=source.config))


def _step(source: HfCheckpoint, name: str, patches: Sequence[Patch]) -> Step:
    spec = source.specs[name]

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        tensor = tensors[0].clone()  # the input may share a reader's memory
        for patch in patches:
            patch.apply(tensor)
        return [tensor]

    return Step((name,), (spec,), run, "deltas") if patches else identity(spec)
