"""CK723: two sides of a launch that must start from the same weights, compared by their manifests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

from ckptkit.formats.detect import MANIFEST, TRACKER, Location, locate
from ckptkit.formats.hf.reader import read_json
from ckptkit.storage.digest import TensorDigest
from ckptkit.transfer.manifest import file_digest, read_manifest
from converters.ops.basic import Copy
from converters.planner import rules_in
from verify.check import Skip, Tally, check
from verify.checks.launch.engine import engine_config, unless_skipped
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.launch.launch import Launch, sides_of
from verify.launch.sides import Side
from verify.launch.stacks.launched import ENGINE
from verify.report import Severity

# A tensor's name on the first side, and its digest on both.
_Pair: TypeAlias = "tuple[str, TensorDigest | None, TensorDigest | None]"


def _pairs(subject: Subject) -> list[tuple[Side, Side]]:
    """The sides that must hold the same weights, and come from different directories. Raises Skip where none do."""
    if subject.launch is None:
        raise Skip("only preflight looks at a launch")
    sides = {side.role: side for side in sides_of(subject.launch) if side.path}
    pairs = [(sides[one], sides[other]) for one, other in _roles(subject.launch) if {one, other} <= sides.keys()]
    if not (apart := [(one, other) for one, other in pairs if one.path != other.path]):
        raise Skip("no two directories of this launch must hold the same weights")
    return apart


def _roles(launch: Launch) -> list[tuple[str, str]]:
    """The roles that start alike: those that the settings name, or all of a run that does not resume.

    An actor with a tracker of its own in --load was trained already.
    """
    if launch.stack:
        return list(launch.stack.alike)
    if launch.load and (launch.load / TRACKER).exists():
        return []
    return [("actor", "reference"), ("actor", "rollout engine")]


@check(
    "CK723",
    "sides that start alike hold the same weights",
    stage="launch",
    rationale=(
        "A run begins with a KL of zero only where actor and reference hold the same weights, and with the policy that "
        "was served only where the engine's do too. Nothing else tells two checkpoints of one architecture apart."
    ),
    fix="Give both sides checkpoints of one release: convert the HF directory that the engine loads.",
    unless=unless_skipped(_pairs),
)
def same_weights(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The digests of ckptkit.json beside both, of tensors that both formats store alike; else what one was made of.

    Other weights than the engine's are a warning.
    """
    left: list[str] = []
    for one, other in _pairs(subject):
        here, there = locate(one.path or Path()), locate(other.path or Path())
        pairs = _compared(subject, here, there)
        if pairs is None:
            if _made_of(here, there) or _made_of(there, here):
                tally.compared(0)
                continue
            missing = next(at for at in (here, there) if _digests(at) is None)
            how = f"`ckptkit verify {here.path} --source {there.path}` compares them"
            left.append(f"{one.role} and {other.role}: no digests in {missing.root / MANIFEST}; {how}")
            continue
        tally.compared(0, len(pairs))
        if wrong := [name for name, mine, others in pairs if mine != others]:
            expected = f"the digests of the {other.role}, {there.path}"
            actual = f"others of {len(wrong)} of the {len(pairs)} tensors that both store alike"
            hint = f"give both sides checkpoints of one release; `ckptkit verify {here.path} --source {there.path}`"
            # The first update replaces the engine's weights, so that these may differ on purpose.
            severity: Severity = "warning" if ENGINE in (one.role, other.role) else "error"
            yield Issue(expected, actual, hint, names=wrong, file=here.path, severity=severity, together=True)
    for line in left:
        tally.note(f"not compared: {line}")
    if left and not tally.tensors:
        raise Skip(f"not compared: {left[0]}")


def _compared(subject: Subject, here: Location, there: Location) -> list[_Pair] | None:
    """Every tensor that both store alike, with both digests; None where one has none, or they share no tensor."""
    mine, other = _digests(here), _digests(there)
    if mine is None or other is None:
        return None
    if here.kind == there.kind:
        named = [(name, name) for name in {**mine, **other}]
    else:
        forwards = here.kind == "megatron"
        named = list(_copied(subject, mine if forwards else other, forwards))
    pairs = [(name, mine.get(name), other.get(theirs)) for name, theirs in named]
    if here.kind != there.kind:
        # Padding and another dtype are no difference; what one side does not store is for other checks.
        pairs = [pair for pair in pairs if pair[1] and pair[2] and _form(pair[1]) == _form(pair[2])]
    return pairs or None


def _copied(subject: Subject, megatron: Mapping[str, TensorDigest], forwards: bool) -> Iterator[tuple[str, str]]:
    """Names on both sides of every tensor that conversion copies as it is, the Megatron name first if `forwards`."""
    config = engine_config(subject.launch.hf_checkpoint) if subject.launch and subject.launch.hf_checkpoint else {}
    for rule in rules_in(config, megatron) if config else ():
        if isinstance(rule.mapping.op, Copy) and len(rule.hf) == 1:
            (name,) = rule.hf
            yield (rule.megatron, name) if forwards else (name, rule.megatron)


def _form(digest: TensorDigest) -> tuple[str, tuple[int, ...]]:
    return digest.dtype, digest.shape


def _digests(location: Location) -> Mapping[str, TensorDigest] | None:
    """Those of the manifest beside a checkpoint; None where there is none, or none with digests."""
    path = location.root / MANIFEST
    if not path.is_file() or "tensors" not in read_json(path):
        return None
    return read_manifest(path).tensors


def _made_of(one: Location, other: Location) -> bool:
    """Whether a checkpoint says that it was made of the other, whose manifest has not changed since."""
    mine, theirs = one.root / MANIFEST, other.root / MANIFEST
    lineage = read_json(mine).get("lineage") if mine.is_file() and theirs.is_file() else None
    if not isinstance(lineage, dict) or lineage.get("digest_of") != "manifest":
        return False
    return file_digest(theirs) == lineage.get("digest")
