"""Replays published deltas onto their base, a tensor at a time, and keeps what is wrong with each change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ckptkit.core.errors import DamagedError
from ckptkit.core.progress import progress
from ckptkit.formats.deltas import Chain, Patch, base_of, chain_at, patches_of
from ckptkit.formats.hf.reader import HfCheckpoint
from ckptkit.storage.buffers import bytes_of
from verify.evidence.reading import threads
from verify.evidence.subject import Subject

if TYPE_CHECKING:
    from torch import Tensor

_PIECE = 1 << 18  # elements that are looked at at a time, which stay in a core's cache
# The bits of a number that are all set where it is NaN or infinite.
_NOT_FINITE: dict[str, np.unsignedinteger[Any]] = {
    "float64": np.uint64(0x7FF0 << 48),
    "float32": np.uint32(0x7F80 << 16),
    "bfloat16": np.uint16(0x7F80),
    "float16": np.uint16(0x7C00),
    "float8_e5m2": np.uint8(0x7C),
    "float8_e4m3fn": np.uint8(0x7F),
    "float8_e8m0fnu": np.uint8(0xFF),
}


@dataclass(frozen=True)
class PatchFault:
    """What is wrong with the change of a tensor."""

    name: str
    file: Path
    expected: str
    actual: str
    hint: str


@dataclass
class Replay:
    """What came of the changes: `broken` could not be applied, of which the first of each tensor counts; `spoiled` are
    those that make numbers infinite or NaN.
    """

    broken: list[PatchFault] = field(default_factory=list)
    spoiled: list[PatchFault] = field(default_factory=list)
    applied: dict[str, int] = field(default_factory=dict)  # changes of each tensor
    nbytes: int = 0


def chain_of(subject: Subject) -> Chain:
    """The versions at the subject's path."""
    return chain_at(subject.path)


def base_in(subject: Subject) -> HfCheckpoint | None:
    """What the deltas start from; None where no version is full and none was given."""
    chain = subject.once(chain_of)
    return base_of(chain, subject.source_path) if chain.full or subject.source_path else None


def replay_of(subject: Subject) -> Replay:
    """Applies every change once. Raises CkptkitError where the base cannot be read, or there is none."""
    base, patches = base_of(subject.once(chain_of), subject.source_path), patches_of(subject.once(chain_of))
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
    result, before = Replay(applied={name: 0}), not_finite(tensor, dtype)
    for patch in patches:
        try:
            changed = patch.apply(tensor)
        except DamagedError as error:
            actual = error.message.removeprefix(f"{patch.shard.path}: {name}: ")
            expected = f"the change from version {patch.version.number - 1} to {patch.version.number}"
            result.broken.append(PatchFault(name, patch.shard.path, expected, actual, error.hint or ""))
            break
        if not changed:
            hint = "it has been applied before: version was published twice, or the base is a later one than it says"
            result.broken.append(PatchFault(name, patch.shard.path, "changed bytes", "it changes nothing", hint))
        if (after := not_finite(tensor, dtype)) > before:
            hint = (
                "training diverged; engines for which NaN means `unchanged` (vLLM's sparse patches) keep the old value"
            )
            actual = f"{after - before} elements become NaN or infinite"
            result.spoiled.append(PatchFault(name, patch.shard.path, "finite numbers", actual, hint))
        before = after
        result.applied[name] += 1
        result.nbytes += tensor.nbytes
    return result


def not_finite(tensor: Tensor, dtype: str) -> int:
    """How many elements are NaN or infinite. By bits, at ten times the speed of torch's isfinite in bfloat16."""
    if dtype not in _NOT_FINITE:
        return 0
    mask = _NOT_FINITE[dtype]
    flat: NDArray[Any] = np.frombuffer(bytes_of(tensor), mask.dtype)
    pieces = (flat[begin : begin + _PIECE] for begin in range(0, len(flat), _PIECE))
    return sum(int(np.count_nonzero((piece & mask) == mask)) for piece in pieces)
