"""CK723: compares two sides that must start from the same weights, by manifests, or else by samples."""

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
from ckptkit.verify.core.check import CheckResult, check
from ckptkit.verify.core.issue import Issue, warning_if
from ckptkit.verify.core.skip import CannotCheck, NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.samples import SamplePair, Stored, samples_of
from ckptkit.verify.launch.checks.architecture import differ_in_architecture
from ckptkit.verify.launch.checks.engine import engine_config, job_of
from ckptkit.verify.launch.sides import ENGINE, Side

# Facts for the verdict: the comparisons that were made, and a line for each pair without one.
COMPARED, NOT_COMPARED = "weights compared", "weights not compared"

_Pair: TypeAlias = "tuple[Side, Side]"
_Places: TypeAlias = "tuple[Location, Location]"
# A tensor's name on the first side, and its digest on both.
_Digests: TypeAlias = "tuple[str, TensorDigest | None, TensorDigest | None]"


def _pairs(subject: Subject) -> list[_Pair]:
    """The sides that must have the same weights, from different directories. Raises NotApplicable without any."""
    job = job_of(subject)
    sides = {side.role: side for side in job.sides_with_weights()}
    pairs = [(sides[first], sides[second]) for first, second in job.sharing if {first, second} <= sides.keys()]
    if not (pairs := [(first, second) for first, second in pairs if first.path != second.path]):
        raise NotApplicable("the launch has no two directories that must have the same weights")
    return pairs


@check("CK723", needs=("sound headers",), applies_to=_pairs)
def same_weights(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Compares the tensors that both formats store alike: by digests of the manifests, by lineage, or by samples."""
    skipped: list[str] = []
    for pair in _pairs(subject):
        first, second = pair
        here, there = (locate(side.path or Path()) for side in pair)
        digests = _digest_pairs(here, there)
        if differ_in_architecture(subject, first, second):
            result.compared()  # CK740 reports it
        elif digests is not None:
            _count(result, "digests of weights", len(digests))
            if names := [name for name, digest, other in digests if digest != other]:
                actual = f"{len(names)} of {len(digests)} tensors with the same dtype and shape differ"
                yield _difference(pair, (here, there), "digests", actual, names, _unrelated(subject, pair))
        elif _is_made_from(here, there) or _is_made_from(there, here):
            _count(result, "digests of weights")
        elif here.legacy or there.legacy:
            diff = f"`ckptkit diff {here.path} {there.path}` compares them"
            skipped.append(f"{first.role} and {second.role}, since one is in Megatron's legacy format; {diff}")
        else:
            yield from _by_samples(subject, pair, (here, there), result, skipped)
    for line in skipped:
        result.note(f"not compared: {line}")
    paths = {side.path for pair in _pairs(subject) for side in pair}
    others = [side.role for side in job_of(subject).sides_with_weights() if side.path not in paths]
    result.facts[NOT_COMPARED] = [*skipped, *others]
    if skipped and not result.tensors_compared:
        raise CannotCheck(f"not compared: {skipped[0]}", "CK723")


def _count(result: CheckResult, comparison: str, tensors: int = 1, nbytes: int = 0) -> None:
    result.compared(tensors, nbytes)
    result.facts.setdefault(COMPARED, []).append(comparison)


def _difference(
    pair: _Pair, places: _Places, kind: str, actual: str, names: Sequence[str], unrelated: Sequence[str]
) -> Issue:
    """The issue of tensors that differ; the `unrelated` ones are of another model."""
    (first, second), (here, there) = pair, places
    hint = f"use checkpoints of one release for both; `ckptkit diff {here.path} {there.path}` compares all values"
    actual += f", {len(unrelated)} of them as if from another model or layer" if unrelated else ""
    # The first update replaces the engine's weights, so weights that training may have made can differ on purpose.
    severity = warning_if(ENGINE in (first.role, second.role) and (not unrelated or first.is_trained))
    expected = f"the {kind} of the {second.role}, {there.path}"
    return Issue(expected, actual, hint, names=names, file=here.path, severity=severity, as_one=True)


def _by_samples(
    subject: Subject, pair: _Pair, places: _Places, result: CheckResult, skipped: list[str]
) -> Iterator[Issue]:
    """Compares samples of two sides, or adds a line to `skipped` if there is nothing to compare."""
    here, there = _subjects(subject, pair)
    roles, diff = f"{pair[0].role} and {pair[1].role}", f"`ckptkit diff {places[0].path} {places[1].path}` compares all"
    tensors = list(_stored_alike(here, there))
    try:
        samples = samples_of(_stored(here), _stored(there), tensors)
    except CkptkitError as error:
        yield Issue("readable bytes", error.message, error.hint or "copy the file again", file=places[0].path)
        return
    reasons = "".join(f"; {count} tensors {reason}" for reason, count in samples.left_out.items())
    if not samples.compared:
        skipped.append(f"{roles}, since they have no tensor of the same dtype and shape{reasons}; {diff}")
        return
    count = len(samples.compared)
    _count(result, "samples of weights", count, samples.nbytes)
    result.note(f"{roles}: compared samples of {count} tensors, {samples.nbytes / 1e6:.1f} MB of each; {diff}")
    if samples.left_out:
        result.note(f"{roles}: not compared{reasons.replace(';', ':', 1)}")
    if samples.differing:
        actual = f"{len(samples.differing)} of {count} sampled tensors differ"
        yield _difference(pair, places, "bytes", actual, samples.differing, samples.unrelated)


def _unrelated(subject: Subject, pair: _Pair) -> Sequence[str]:
    """The sampled matrices that training cannot have made from the other side's, if samples can be read."""
    here, there = _subjects(subject, pair)
    with suppress(CkptkitError):
        return samples_of(_stored(here), _stored(there), _stored_alike(here, there)).unrelated
    return ()


def _subjects(subject: Subject, pair: _Pair) -> tuple[Subject, Subject]:
    here, there = (subject.loaded.get(side.path or Path()) or Subject(side.path or Path()) for side in pair)
    return here, there


def _stored(side: Subject) -> Stored:
    """The tensors of a directory. Raises CkptkitError if `.metadata` cannot be read."""
    return side.hf_files if side.kind == "hf" else side.megatron_files.opened


def _stored_alike(here: Subject, there: Subject) -> Iterator[SamplePair]:
    """The tensors that both sides store alike, by their names on both."""
    if here.kind == there.kind:
        yield from (SamplePair(name, name) for name in here.specs)
        return
    hf, megatron = (here, there) if here.kind == "hf" else (there, here)
    for hf_name, name, is_padded in _copied(engine_config(hf.path), hf.specs, megatron.specs):
        yield SamplePair(*((hf_name, name) if here is hf else (name, hf_name)), is_padded)


def _digest_pairs(here: Location, there: Location) -> list[_Digests] | None:
    """Both digests of every tensor that both store alike, or None without digests or such tensors."""
    first, second = _digests(here), _digests(there)
    if first is None or second is None:
        return None
    if here.kind == there.kind:
        return [(name, first.get(name), second.get(name)) for name in {**first, **second}] or None
    hf, hf_digests, digests = (there.path, second, first) if here.kind == "megatron" else (here.path, first, second)
    pairs: list[_Digests] = []
    for hf_name, name, _ in _copied(engine_config(hf), hf_digests, digests):
        one, other = hf_digests.get(hf_name), digests.get(name)
        # Padding and another dtype are not a difference. Other checks report missing tensors.
        if one and other and (one.dtype, one.shape) == (other.dtype, other.shape):
            pairs.append((name, other, one) if here.kind == "megatron" else (hf_name, one, other))
    return pairs or None


def _digests(location: Location) -> Mapping[str, TensorDigest] | None:
    """The digests in the manifest of a checkpoint, or None."""
    path = location.root / MANIFEST
    return read_manifest(path).tensors if path.is_file() and "tensors" in read_json(path) else None


def _is_made_from(result: Location, source: Location) -> bool:
    """Whether the manifest of `result` contains the digest of the manifest of `source`."""
    path, source_path = result.root / MANIFEST, source.root / MANIFEST
    lineage = read_json(path).get("lineage") if path.is_file() and source_path.is_file() else None
    if not isinstance(lineage, dict) or lineage.get("digest_of") != "manifest":
        return False
    return file_digest(source_path) == lineage.get("digest")


def _copied(
    config: Mapping[str, Any], hf: Collection[str], megatron: Collection[str]
) -> Iterator[tuple[str, str, bool]]:
    """HF and Megatron name of every tensor that conversion copies unchanged, and whether Megatron may pad its rows.

    `hf` and `megatron` are the names in the two checkpoints. Raises CkptkitError as `adapt_config`.
    """
    if not config:
        return
    config = adapt_config(config, hf)
    experts = dims_of(config).experts
    for mapping in mappings_of(config, dialect_of(config, megatron)):
        if isinstance(mapping.op, Copy) and len(mapping.hf) == 1 and not mapping.upcast:
            for name, (hf_name,) in mapping.expand(experts):
                yield hf_name, name, mapping.vocab
