"""CK122, CK123, CK221 and CK222: published deltas are in order, complete, and can be replayed onto their base."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.errors import DamagedError
from ckptkit.core.progress import progress
from ckptkit.formats.deltas import Chain, FileFault, Patch, base_of, chain_at, file_faults, order_faults, patches_of
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.storage.buffers import bytes_of
from ckptkit.verify.core.check import CheckResult, Issue, NotApplicable, Subject, check, once, only_if
from ckptkit.verify.evidence.both_sides import threads
from ckptkit.verify.evidence.folding import by_key

if TYPE_CHECKING:
    from torch import Tensor


def _issues(faults: Iterable[FileFault]) -> Iterator[Issue]:
    for path, fault in faults:
        names = None if fault.name is None else [fault.name]
        yield Issue(fault.expected, fault.actual, fault.hint or "copy this version again", names=names, file=path)


@check("CK122", gate=True)
def versions_in_order(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """The numbers, bases and encodings of directories and indexes."""
    chain = chain_of(subject)
    result.compared(len(chain.versions))
    if chain.full:
        result.note(f"{chain.full.name} is a full checkpoint, so older versions and the base were not checked")
    yield from _issues(order_faults(chain))


@check("CK123", gate=True)
def deltas_whole(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Files against headers and index, tensors against the base's, if there is one."""
    chain, base = chain_of(subject), base_in(subject)
    result.compared(sum(len(shard.specs) for one in chain.deltas for shard in one.shards) or len(chain.versions))
    yield from _issues(file_faults(chain, base.specs if base else None))


@once
def base_in(subject: Subject) -> HfCheckpoint | None:
    """The base of the deltas: a full version, --source, or None."""
    chain = chain_of(subject)
    return base_of(chain, subject.source_path) if chain.full or subject.source_path else None


_needs_base = only_if(base_in, "--source was not given, and no version is a full checkpoint")


def _replay_issues(subject: Subject, result: CheckResult, kind: Literal["broken", "spoiled"]) -> Iterator[Issue]:
    replay = replay_of(subject)
    if not replay.applied:
        raise NotApplicable("no version changes any tensor")
    result.compared(sum(replay.applied.values()) or len(replay.applied), nbytes=replay.nbytes)
    for alike in by_key(((one.file, one.expected, one.hint), one) for one in getattr(replay, kind)).values():
        more = f"; {len(alike) - 1} more tensors have the same fault" if alike[1:] else ""
        names = [name for one in alike for name in one.names or ()]
        yield replace(alike[0], actual=f"{alike[0].actual}{more}", names=names, as_one=True)


@check("CK221", applies_to=_needs_base)
def replay_is_exact(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Each change can be decoded, is inside its tensor, changes something, and gives the stored checksum."""
    yield from _replay_issues(subject, result, "broken")


@check("CK222", applies_to=_needs_base)
def deltas_finite(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """No change makes a finite number infinite or NaN."""
    yield from _replay_issues(subject, result, "spoiled")


_PIECE = 1 << 18  # elements in a piece, which fits a core's cache
# The bits of a number that are all set if it is NaN or infinite.
_NOT_FINITE: dict[str, np.unsignedinteger[Any]] = {
    "float64": np.uint64(0x7FF0 << 48),
    "float32": np.uint32(0x7F80 << 16),
    "bfloat16": np.uint16(0x7F80),
    "float16": np.uint16(0x7C00),
    "float8_e5m2": np.uint8(0x7C),
    "float8_e4m3fn": np.uint8(0x7F),
    "float8_e8m0fnu": np.uint8(0xFF),
}


@dataclass
class Replay:
    """The outcome of all changes."""

    broken: list[Issue] = field(default_factory=list)  # changes that could not be applied, the first of each tensor
    spoiled: list[Issue] = field(default_factory=list)  # changes that make numbers infinite or NaN
    applied: dict[str, int] = field(default_factory=dict)  # changes of each tensor
    nbytes: int = 0


@once
def chain_of(subject: Subject) -> Chain:
    """The versions at the subject's path."""
    return chain_at(subject.path)


@once
def replay_of(subject: Subject) -> Replay:
    """Applies every change once. Raises CkptkitError if the base is missing or cannot be read."""
    base, patches = base_of(chain_of(subject), subject.source_path), patches_of(chain_of(subject))
    names = [name for name in base.specs if name in patches]
    result = Replay()
    with (
        progress("replaying deltas", sum(base.specs[name].nbytes for name in names)) as advance,
        threads(max((base.specs[name].nbytes for name in names), default=0)) as pool,
    ):
        for name, one in zip(names, pool.map(partial(_replayed, base), map(patches.__getitem__, names)), strict=True):
            result.broken += one.broken
            result.spoiled += one.spoiled
            result.applied |= one.applied
            result.nbytes += one.nbytes
            advance(base.specs[name].nbytes)
    return result


def _replayed(base: HfCheckpoint, patches: Sequence[Patch]) -> Replay:
    name = patches[0].name
    tensor, dtype = base.read([name])[name], base.specs[name].dtype
    result, before = Replay(applied={name: 0}), count_not_finite(tensor, dtype)
    for patch in patches:
        try:
            changed = patch.apply(tensor)
        except DamagedError as error:
            actual = error.message.removeprefix(f"{patch.shard.path}: {name}: ")
            expected = f"a valid change from version {patch.version.number - 1} to {patch.version.number}"
            result.broken.append(Issue(expected, actual, error.hint or "", [name], patch.shard.path))
            break
        if not changed:
            hint = "pass the older base: this one has the change already; or remove a version that was published twice"
            result.broken.append(Issue("a change of bytes", "no byte changes", hint, [name], patch.shard.path))
        if (after := count_not_finite(tensor, dtype)) > before:
            actual = f"{after - before} elements become NaN or infinite"
            result.spoiled.append(Issue("finite numbers", actual, names=[name], file=patch.shard.path))
        before = after
        result.applied[name] += 1
        result.nbytes += tensor.nbytes
    return result


def count_not_finite(tensor: Tensor, dtype: str) -> int:
    """The number of NaN and infinite elements. Compares bits, ten times as fast as torch's isfinite in bfloat16."""
    if dtype not in _NOT_FINITE:
        return 0
    mask = _NOT_FINITE[dtype]
    flat: NDArray[Any] = np.frombuffer(bytes_of(tensor), mask.dtype)
    pieces = (flat[begin : begin + _PIECE] for begin in range(0, len(flat), _PIECE))
    return sum(int(np.count_nonzero((piece & mask) == mask)) for piece in pieces)
