"""Finds the published versions of a directory, and says what is wrong with their order and their files.

A version `weight_vNNNNNN` is a full HF checkpoint, or a delta against the version before it. A delta is safetensors
files of uint8, an encoded change for each tensor that changed, whose `__metadata__` has a checksum of the new bytes of
each; and an index whose `metadata` has `version`, `base_version`, `delta_encoding`, `compression_format` and
`checksum_format`. Version 0 is the checkpoint that training began with. Engines read every safetensors file, whatever
the index says. Format as in `_write_delta_files` of slime 624b824a, miles 31f1ca96 and vime 03a8e1bf, which agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ckptkit.core.errors import CkptkitError, DamagedError, UnsupportedError
from ckptkit.core.printable import shortened
from ckptkit.core.specs import TensorSpec
from ckptkit.formats.deltas.codec import CHECKSUMS, ENCODINGS
from ckptkit.formats.detect import VERSION
from ckptkit.formats.hf.reader import INDEX, read_json
from ckptkit.formats.hf.shard import Fault, Shard, scan_shard, unreadable
from ckptkit.storage.links import why_unreadable

FileFault = tuple[Path, Fault]

_AGAIN = "copy this version again from where the trainer published it; if it is the same there, publish a full one"
_CUT = (
    "the trainer was stopped while it published, or the copy is not complete: copy it again, or take the version before"
)


@dataclass(frozen=True)
class Version:
    """One published version, sound or not."""

    number: int
    path: Path

    @property
    def is_full(self) -> bool:
        """Whether it is a checkpoint by itself."""
        return (self.path / "config.json").exists()

    @cached_property
    def index(self) -> Mapping[str, Any]:
        """The index. Raises CkptkitError where it cannot be read, and UnsupportedError for another kind of delta."""
        if not (self.path / INDEX).exists() and (self.path / "manifest.json").exists():
            hint = "publish with the CPU's encoder, or a full checkpoint, to have it verified"
            raise UnsupportedError(f"{self.path} has a manifest.json: a delta of miles' GPU encoder is not read", hint)
        return read_json(self.path / INDEX)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the index says of the version; empty where it says nothing."""
        found = self.index.get("metadata")
        return found if isinstance(found, dict) else {}

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The headers of all safetensors files, sound or not, in the order in which engines read them."""
        return tuple(map(_scanned, sorted(self.path.glob("*.safetensors"))))


def _scanned(path: Path) -> Shard:
    try:
        return scan_shard(path)
    except OSError as error:
        return unreadable(path, why_unreadable(path, error))


@dataclass(frozen=True)
class Chain:
    """The versions of a directory up to `target`. `start` is the newest full one, or 0: the base stands elsewhere."""

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
        """The versions after the one to start from, in order."""
        return [self.versions[number] for number in sorted(self.versions) if number > self.start]


def chain_at(path: Path) -> Chain:
    """The versions in a directory, or up to the one at `path`. Raises CkptkitError where there is none."""
    here = VERSION.fullmatch(path.name)
    root = path.parent if here else path
    found = {int(match[1]): root / match[0] for entry in root.iterdir() if (match := VERSION.fullmatch(entry.name))}
    target = int(here[1]) if here else max(found, default=0)
    if not found:
        raise CkptkitError(f"{path} holds no published version", "give the directory with weight_v000001 and so on")
    versions = {number: Version(number, at) for number, at in found.items() if number <= target}
    start = max((number for number, one in versions.items() if one.is_full), default=0)
    return Chain(root, target, versions, start)


def lone(path: Path) -> Chain:
    """One delta, without those before it. Raises CkptkitError where its directory does not have the name of one."""
    here = VERSION.fullmatch(path.name)
    if here is None:
        raise CkptkitError(f"{path} is not named as a published version", "it must be weight_v and its number")
    number = int(here[1])
    return Chain(path.parent, number, {number: Version(number, path)}, number - 1)


def require_sound(chain: Chain, specs: Mapping[str, TensorSpec]) -> None:
    """Raises DamagedError for the first fault that headers show. `specs`: the tensors of the base."""
    for path, fault in (*order_faults(chain), *file_faults(chain, specs)):
        raise DamagedError(f"{path}: {fault}", fault.hint or _AGAIN)


def order_faults(chain: Chain) -> Iterator[FileFault]:
    """Versions that are not there, are not what their directory says, or cannot be decoded by what they state."""
    for number in range(chain.start + 1, chain.target + 1):
        if number not in chain.versions:
            hint = "no later version can be applied: restore it, or start from a full checkpoint of a later version"
            yield chain.root / f"weight_v{number:06d}", Fault(f"version {number}", "it is missing", hint=hint)
    for one in chain.deltas:
        try:
            stated = one.metadata
        except UnsupportedError:
            raise
        except CkptkitError as error:
            yield one.path / INDEX, Fault("the index, which is published last", error.message, hint=_CUT)
            continue
        yield from ((one.path / INDEX, fault) for fault in _stated_faults(one.number, stated))


def _stated_faults(number: int, stated: Mapping[str, Any]) -> Iterator[Fault]:
    order = {"version": number, "base_version": number - 1}
    wrong = [key for key, true in order.items() if not str(stated.get(key)).isdecimal() or int(stated[key]) != true]
    if wrong:
        said = ", ".join(f"{key} {shortened(stated.get(key))}" for key in order)
        hint = "a copy of another version stands here, or one of another run: restore what the trainer published"
        yield Fault(f"version {number}, based on {number - 1}", said, hint=hint)
    known = {"delta_encoding": ENCODINGS, "compression_format": ("zstd",), "checksum_format": CHECKSUMS}
    for key, values in known.items():
        if stated.get(key) not in values:
            yield Fault(f"{key} of {', '.join(values)}", shortened(stated.get(key)), hint="no engine can apply it")


def file_faults(chain: Chain, specs: Mapping[str, TensorSpec] | None) -> Iterator[FileFault]:
    """Files that are not whole or not those of the index, and tensors that are not those of the base.

    `specs`: the tensors of the base; None where it is not known.
    """
    for one in chain.deltas:
        for shard in one.shards:
            yield from ((shard.path, fault) for fault in shard.faults)
            yield from ((shard.path, fault) for fault in _tensor_faults(shard, specs))
        yield from _index_faults(one)


def _tensor_faults(shard: Shard, specs: Mapping[str, TensorSpec] | None) -> Iterator[Fault]:
    for name, spec in shard.specs.items():
        if specs is not None and name not in specs:
            hint = "the delta is of another model, or its names are not those of --hf-checkpoint"
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
            what = "it is in no file" if (one.path / str(file)).exists() else f"{shortened(file)} is missing"
            yield index, Fault("every tensor that it lists", what, name, "engines would apply a part: " + _AGAIN)
    for name in stored.keys() - listed.keys():
        yield index, Fault("every tensor that is stored", f"{stored[name]} has one more", name, _AGAIN)
    times = Counter(name for shard in one.shards for name in shard.specs)
    for name in (name for name, count in times.items() if count > 1):
        hint = "engines apply each of them, and a second XOR undoes the first (replicated embeddings of two stages)"
        yield index, Fault("each tensor once", f"it is in {times[name]} files", name, hint)
