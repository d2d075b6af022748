"""CK723: two sides of a launch that must start from the same weights, compared by manifests, or else by samples."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from ckptkit.converters.ops.basic import Copy
from ckptkit.converters.planner import dialect_of, dims_of, mappings_of
from ckptkit.converters.stored import adapt_config
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.detect import MANIFEST, Location, locate
from ckptkit.formats.hf.reader import read_json
from ckptkit.storage.digest import TensorDigest
from ckptkit.transfer.manifest import file_digest, read_manifest
from ckptkit.verify.core.check import Tally, check
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.core.report import Severity
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.samples import SamplePair, Stored, samples_of
from ckptkit.verify.launch.checks.architecture import of_two_models
from ckptkit.verify.launch.checks.engine import engine_config, job_of
from ckptkit.verify.launch.sides import ENGINE, Side, is_trained

# Facts for the verdict: what was compared of weights, and a line for each two sides that could not be.
COMPARED, NOT_COMPARED = "weights compared", "weights not compared"

# A tensor's name on the first side, and its digest on both.
_Digests: TypeAlias = "tuple[str, TensorDigest | None, TensorDigest | None]"


def _pairs(subject: Subject) -> list[tuple[Side, Side]]:
    """The sides that must hold the same weights, and come from different directories.

    Raises NotApplicable where none do.
    """
    job = job_of(subject)
    sides = {side.role: side for side in job.loading()}
    pairs = [(sides[one], sides[other]) for one, other in job.sharing if {one, other} <= sides.keys()]
    if not (apart := [(one, other) for one, other in pairs if one.path != other.path]):
        raise NotApplicable("no two directories of this launch must hold the same weights")
    return apart


@check("CK723", needs=("sound headers",), applies_to=_pairs)
def same_weights(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """The digests of ckptkit.json beside both, of tensors that both formats store alike; else what one was made of.

    Where a manifest is missing, samples of such tensors. Other weights than the engine's are a warning where training
    may have made them of these; those of another model are an error.
    """
    left: list[str] = []
    for one, other in _pairs(subject):
        here, there = locate(one.path or Path()), locate(other.path or Path())
        pairs = _by_digests(here, there)
        if of_two_models(subject, one, other):
            tally.compared()  # CK740 says so
        elif pairs is not None:
            tally.compared(len(pairs))
            tally.facts[COMPARED] = [*tally.facts.get(COMPARED, []), "digests of weights"]
            wrong = [name for name, mine, others in pairs if mine != others]
            unrelated = _unrelated(subject, (one, other)) if wrong else []
            yield from _differing(wrong, len(pairs), (one, other), (here, there), "digests", unrelated)
        elif _made_of(here, there) or _made_of(there, here):
            tally.compared()
            tally.facts[COMPARED] = [*tally.facts.get(COMPARED, []), "digests of weights"]
        elif here.legacy or there.legacy:
            how = f"`ckptkit diff {here.path} {there.path}` compares them"
            left.append(f"{one.role} and {other.role}: no samples are read of Megatron's legacy format; {how}")
        else:
            yield from _by_samples(subject, (one, other), (here, there), tally, left)
    for line in left:
        tally.note(f"not compared: {line}")
    tally.facts[NOT_COMPARED] = [*left, *_apart(subject)]
    if left and not tally.tensors:
        raise CannotCheck(f"not compared: {left[0]}", "CK723")


def _apart(subject: Subject) -> list[str]:
    """The sides whose weights are their own, which nothing is compared with: of a run that resumes, of a critic ..."""
    shared = {side.path for pair in _pairs(subject) for side in pair}
    return [side.role for side in job_of(subject).loading() if side.path not in shared]


def _differing(
    wrong: Sequence[str],
    count: int,
    sides: tuple[Side, Side],
    places: tuple[Location, Location],
    what: str,
    unrelated: Sequence[str] = (),
) -> Iterator[Issue]:
    """The issue that these tensors are; `what` of them was compared. `unrelated` are of another model."""
    if not wrong:
        return
    other, (here, there) = sides[1], places
    expected = f"the {what} of the {other.role}, {there.path}"
    actual = f"others of {len(wrong)} of the {count} tensors that both store alike"
    if what == "bytes":
        actual = f"others in {len(wrong)} of the {count} tensors of which samples were read"
    hint = f"give both sides checkpoints of one release; `ckptkit diff {here.path} {there.path}` compares all"
    if unrelated:
        actual += f": {len(unrelated)} matrices are another model's, or another layer's"
    # The first update replaces the engine's weights, so that these may differ on purpose.
    update = ENGINE in (sides[0].role, other.role) and (not unrelated or is_trained(sides[0]))
    severity: Severity = "warning" if update else "error"
    yield Issue(expected, actual, hint, names=wrong, file=here.path, severity=severity, together=True)


def _by_samples(
    subject: Subject, sides: tuple[Side, Side], places: tuple[Location, Location], tally: Tally, left: list[str]
) -> Iterator[Issue]:
    """Compares samples of two sides, and adds a line to `left` where there is nothing to compare."""
    here, there = (subject.loaded.get(side.path or Path()) or Subject(side.path or Path()) for side in sides)
    both = f"{sides[0].role} and {sides[1].role}"
    how = f"`ckptkit diff {places[0].path} {places[1].path}` compares all"
    pairs = list(_alike(here, there))
    try:
        found = samples_of(_stored(here), _stored(there), pairs)
    except CkptkitError as error:
        yield Issue("bytes that can be read", error.message, error.hint or "copy it again", file=places[0].path)
        return
    why = "".join(f"; {count} tensors {reason}" for reason, count in found.left_out.items())
    if not found.compared:
        left.append(f"{both}: no tensor that both store alike{why}; {how}")
        return
    tally.compared(len(found.compared), nbytes=found.nbytes)
    tally.facts[COMPARED] = [*tally.facts.get(COMPARED, []), "samples of weights"]
    size = f"{found.nbytes / 1e6:.1f} MB of each"
    tally.note(f"{both}: samples of {len(found.compared)} tensors compared, {size}; {how}")
    if found.left_out:
        tally.note(f"{both}: not compared{why.replace(';', ':', 1)}")
    yield from _differing(found.differing, len(found.compared), sides, places, "bytes", found.unrelated)


def _unrelated(subject: Subject, sides: tuple[Side, Side]) -> Sequence[str]:
    """The sampled matrices that no training makes of the other side's; none where no sample can be read."""
    here, there = (subject.loaded.get(side.path or Path()) or Subject(side.path or Path()) for side in sides)
    with suppress(CkptkitError):
        return samples_of(_stored(here), _stored(there), _alike(here, there)).unrelated
    return ()


def _stored(side: Subject) -> Stored:
    """What can be sampled of a directory. Raises CkptkitError where `.metadata` cannot be read."""
    return side.hf_files if side.is_hf else side.megatron_files.opened


def _alike(here: Subject, there: Subject) -> Iterator[SamplePair]:
    """The tensors that both sides store alike, by their names on both."""
    if here.kind == there.kind:
        yield from (SamplePair(name, name) for name in here.specs)
        return
    hf, megatron = (here, there) if here.is_hf else (there, here)
    for name, other, padded in _copied(engine_config(hf.path), hf.specs, megatron.specs):
        yield SamplePair(*((name, other) if here is hf else (other, name)), padded)


def _by_digests(here: Location, there: Location) -> list[_Digests] | None:
    """Every tensor that both store alike, with both digests; None where one has none, or they share no tensor."""
    mine, other = _digests(here), _digests(there)
    if mine is None or other is None:
        return None
    if here.kind == there.kind:
        return [(name, mine.get(name), other.get(name)) for name in {**mine, **other}] or None
    forwards = here.is_megatron
    hf, megatron = (there.path, mine) if forwards else (here.path, other)
    pairs: list[_Digests] = []
    for name, of_megatron, _ in _copied(engine_config(hf), other if forwards else mine, megatron):
        names = (of_megatron, name) if forwards else (name, of_megatron)
        one, another = mine.get(names[0]), other.get(names[1])
        # Padding and another dtype are not a difference; what one side does not store is for other checks.
        if one and another and _form(one) == _form(another):
            pairs.append((names[0], one, another))
    return pairs or None


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


def _copied(
    config: Mapping[str, Any], hf: Collection[str], megatron: Collection[str]
) -> Iterator[tuple[str, str, bool]]:
    """HF and Megatron name of every tensor that conversion copies as it is, and whether Megatron may add rows to it.

    `hf` and `megatron` are the names that the two checkpoints store. No pair follows from an empty config. Raises
    CkptkitError as `adapt_config`.
    """
    if not config:
        return
    config = adapt_config(config, hf)
    dialect = dialect_of(config, megatron)
    experts = dims_of(config).experts
    for mapping in mappings_of(config, dialect):
        if isinstance(mapping.op, Copy) and len(mapping.hf) == 1 and not mapping.upcast:
            for name, (other,) in mapping.expand(experts):
                yield other, name, mapping.vocab
