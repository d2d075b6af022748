"""CK122, CK123, CK221 and CK222: published deltas, in order, whole, and replayed onto their base."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ckptkit.formats.deltas import FileFault, file_faults, order_faults
from verify.check import Skip, Tally, check
from verify.checks.deltas.replaying import PatchFault, base_in, chain_of, replay_of
from verify.evidence.subject import Subject
from verify.issue import Issue


def _no_base(subject: Subject) -> str | None:
    return None if subject.once(base_in) else "no --source was given, and no version is full"


def _issues(faults: Iterable[FileFault]) -> Iterator[Issue]:
    """Faults of one kind in one file are one issue of several tensors."""
    grouped: dict[tuple[Path, str, str, str], list[str | None]] = defaultdict(list)
    for path, fault in faults:
        grouped[path, fault.expected, fault.actual, fault.hint or "copy this version again"].append(fault.name)
    for (path, expected, actual, hint), found in grouped.items():
        names = [name for name in found if name is not None]
        yield Issue(expected, actual, hint, names or None, path)


@check(
    "CK122",
    "every version of the deltas is there, each based on the one before",
    stage="deltas",
    gate=True,
    rationale="A delta means something only on top of the version that it was made against. With one that is missing, "
    "stands twice or comes from another run, every later version is another model than the trainer's.",
    fix="Restore the version from where the trainer published it, or have it publish a full checkpoint, from which "
    "engines start anew.",
)
def versions_in_order(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Numbers of directories and indexes, what each is based on, and how it is encoded."""
    chain = subject.once(chain_of)
    tally.compared(0, len(chain.versions))
    if chain.full:
        tally.note(f"{chain.full.name} is a full checkpoint: older versions were not looked at, nor any base")
    yield from _issues(order_faults(chain))


@check(
    "CK123",
    "every delta is whole, and changes tensors of the base",
    stage="deltas",
    gate=True,
    rationale="Engines apply every file of a delta, also one that its index does not name, and some look no further "
    "than the first that fails.",
    fix="Copy the version again from where the trainer published it; if it is the same there, publish a full one.",
)
def deltas_whole(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Files against their headers and the index, tensors against the base's, where there is one."""
    chain, base = subject.once(chain_of), subject.once(base_in)
    tally.compared(0, sum(len(shard.specs) for one in chain.deltas for shard in one.shards) or len(chain.versions))
    yield from _issues(file_faults(chain, base.specs if base else None))


def _faulty(subject: Subject, tally: Tally, which: Callable[[Subject], list[PatchFault]]) -> Iterator[Issue]:
    replay = subject.once(replay_of)
    if not replay.applied:
        raise Skip("no version changes any tensor")
    tally.compared(replay.nbytes, sum(replay.applied.values()) or len(replay.applied))
    grouped: dict[tuple[Path, str, str], list[PatchFault]] = defaultdict(list)
    for fault in which(subject):
        grouped[fault.file, fault.expected, fault.hint].append(fault)
    for (path, expected, hint), found in grouped.items():
        more = f", and {len(found) - 1} more tensors likewise" if found[1:] else ""
        yield Issue(expected, f"{found[0].actual}{more}", hint, [one.name for one in found], path, together=True)


@check(
    "CK221",
    "replayed onto the base, every delta gives the bytes that its writer had",
    stage="deltas",
    needs=("sound headers",),
    unless=_no_base,
    rationale="Deltas are applied in place, without a way back. On another base, out of order or twice they give other "
    "weights, and a trainer that does not look at what its engines answer trains on against them (slime#2104).",
    fix="Name the base of this very run. If it is, start engines anew from a full checkpoint.",
)
def replay_is_exact(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Each change is decoded, lies inside its tensor, changes something, and leads to the stored checksum."""
    yield from _faulty(subject, tally, lambda here: here.once(replay_of).broken)


@check(
    "CK222",
    "no delta makes a number NaN or infinite",
    stage="deltas",
    needs=("sound headers",),
    unless=_no_base,
    rationale="A NaN among weights makes every answer NaN. Engines that patch with NaN for `unchanged` keep the old "
    "value instead, and trainer and engine part silently.",
    fix="Go back to the version before it, and see why training diverged.",
)
def deltas_finite(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Numbers that were finite and are not after a change; those that the base has already do not count."""
    yield from _faulty(subject, tally, lambda here: here.once(replay_of).spoiled)
