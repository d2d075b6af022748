"""CK740, CK748: the checkpoints of one launch hold models of one architecture, in the class that the launch builds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptkit.converters.megatron.arguments import comparable_args
from ckptkit.converters.megatron.hybrid_model import PATTERNS, gpt_only, stored_pattern
from ckptkit.converters.planner import dims_of
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.formats.detect import is_legacy
from ckptkit.verify.checks.config.arguments import differing, mismatches
from ckptkit.verify.core.check import Tally, check
from ckptkit.verify.core.issue import Issue
from ckptkit.verify.core.report import Severity
from ckptkit.verify.core.skip import NotApplicable
from ckptkit.verify.core.subject import Subject
from ckptkit.verify.evidence.expected import expected_of
from ckptkit.verify.evidence.folding import LAYER
from ckptkit.verify.evidence.side_files import SideFiles
from ckptkit.verify.launch.checks.engine import engine_config, job_of
from ckptkit.verify.launch.job import Job
from ckptkit.verify.launch.options.argv import options_of
from ckptkit.verify.launch.sides import ENGINE, Side
from ckptkit.verify.quirks import quirk

# slime and miles make a critic's output layer anew where its shape is another one.
_OF_A_CRITIC = ("untie_embeddings_and_output_weights", "vocab_size", "padded_vocab_size")
_NAMED = 3

Shapes = Mapping[str, "tuple[int, ...] | None"]
# What one checkpoint holds otherwise than another: tensors, and arguments with both values.
_Differences = tuple[list[str], list[tuple[str, str, str]]]


def describe_difference(arguments: Sequence[str], tensors: int) -> str:
    """What a model has otherwise: some arguments by name, the number of the others, and of tensors."""
    left = len(arguments) - _NAMED
    more = [f"{left} more argument{'s' * (left > 1)}"] if left > 0 else []
    held = [f"{tensors} tensors with other names or shapes"] if tensors else []
    return ", ".join([*arguments[:_NAMED], *more, *held])


def _roles(subject: Subject) -> tuple[Mapping[str, Any], list[Side]]:
    """The launch's config, and the sides to hold against it; without one against the first of them.

    Actor and reference are held against a config by the checks of headers. Raises NotApplicable where there is no such
    side.
    """
    job = job_of(subject)
    if not job.stack.one_model:
        raise NotApplicable("by settings every role is held against the config of its own model")
    config = engine_config(job.hf) if job.hf else {}
    sides: dict[Path, Side] = {}
    for side in job.sides:
        if side.path and side.role != ENGINE:
            sides.setdefault(side.path, side)
    if config:
        others = [side for side in sides.values() if side.role in ("critic", "teacher")]
        if not others:
            raise NotApplicable("the launch loads neither a critic nor a teacher of its own")
        return config, others
    if len(sides) < 2:
        raise NotApplicable("the launch has neither --hf-checkpoint nor two checkpoints to compare")
    return {}, list(sides.values())


@check("CK740", needs=("sound headers",), applies_to=_roles)
def one_architecture(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Names and shapes of tensors, and stored arguments: of critic and teacher against --hf-checkpoint.

    Without --hf-checkpoint, of all against the first.
    """
    config, sides = _roles(subject)
    first, *rest = sides
    hf = job_of(subject).hf
    of = f"{hf}/config.json" if config else f"the {first.role}, {first.path}"
    for side in sides if config else rest:
        tally.compared()
        if why := _incomparable(side, None if config else first):
            tally.note(f"{why}, so its architecture is not compared")
            continue
        try:
            tensors, arguments = _from_config(side, config, hf) if config else _from_side(first, side)
        except UnsupportedError:
            raise
        except CkptkitError as error:
            yield Issue("headers that can be read", error.message, error.hint or "copy it again", file=side.path)
            continue
        if tensors or arguments:
            hint = f"give the {side.role} a checkpoint of the model that the launch trains"
            found = [f"{name} = {value} and not {want}" for name, want, value in arguments]
            actual = f"another one: {describe_difference(found, len(tensors))}"
            yield Issue(f"the model of {of}", actual, hint, tensors or None, side.path, together=True)


def differ_in_architecture(subject: Subject, one: Side, other: Side) -> bool:
    """Whether this check finds that two sides, which no config of the launch is held against, are of two models."""
    job = job_of(subject)
    if not job.stack.one_model or job.hf or _incomparable(other, one):
        return False
    try:
        return any(_from_side(one, other))
    except CkptkitError:
        return False


def _incomparable(side: Side, first: Side | None) -> str | None:
    """Why a side is not compared; None where it is."""
    if any(is_legacy(one.path) for one in (side, first) if one and one.path):
        return f"{side.role}: in Megatron's legacy format"
    if first and first.kind != side.kind:
        return f"{first.role} and {side.role}: in two formats, and there is no --hf-checkpoint"
    return None


def _from_config(side: Side, config: Mapping[str, Any], hf: Path | None) -> _Differences:
    """What a side holds otherwise than the launch's config says. Raises CkptkitError where it cannot be read."""
    critic, path = side.role == "critic", side.path or Path()
    if side.is_hf:
        want, have = (comparable_args(dims_of(one)) for one in (config, SideFiles(path).config))
        names = sorted(want.keys() | have.keys())
        pairs = [(name, str(want.get(name)), str(have.get(name))) for name in names if want.get(name) != have.get(name)]
        return [], _of_role(pairs, critic)
    subject = Subject(path, hf_path=hf)
    expected, args = expected_of(subject), subject.megatron_files.args
    dims = dims_of(config) if args.get("mtp_num_layers") else replace(dims_of(config), mtp_layers=0)
    tensors = _other_shapes(expected.shapes, _shapes(subject), critic) if expected else []
    return tensors, _of_role(mismatches(dims, args) if args else (), critic)


def _from_side(first: Side, side: Side) -> _Differences:
    """What a side holds otherwise than the first one in the same format. Raises CkptkitError as `_from_config`."""
    here, there = (Subject(one.path or Path()) for one in (first, side))
    want, have = ({name: shape for name, shape in _shapes(one).items() if LAYER.search(name)} for one in (here, there))
    critic = side.role == "critic"
    tensors = _other_shapes(want, have, critic)
    if side.is_hf:
        # Packed tensors have names of their own.
        return [name for name in tensors if name in want and name in have], []
    args = here.megatron_files.args, there.megatron_files.args
    return tensors, _of_role(differing(*args) if all(args) else (), critic)


def _shapes(subject: Subject) -> Shapes:
    return {name: spec.shape for name, spec in subject.specs.items()}


def _of_role(arguments: Iterable[tuple[str, str, str]], critic: bool) -> list[tuple[str, str, str]]:
    return [one for one in arguments if not (critic and one[0] in _OF_A_CRITIC)]


def _other_shapes(want: Shapes, have: Shapes, critic: bool) -> list[str]:
    """Names that only one of two checkpoints has, or with another shape; the vocabulary of `have` may be padded."""
    names = [name for name in {**want, **have} if not (critic and name.startswith("output_layer."))]
    return [name for name in names if not _same_shape(name, want, have)]


def _same_shape(name: str, want: Shapes, have: Shapes) -> bool:
    if name not in want or name not in have:
        return False
    one, other = want[name], have[name]
    if one is None or other is None:
        return True
    padded = name.startswith(("embedding.", "output_layer.")) and other[:1] > one[:1]
    return one[1:] == other[1:] if padded else one == other


# Layers whose tensors are stacked in one key.
_STACKED = re.compile(r"decoder\.layers\.(?!\d+\.)")
_CLASSES = ("GPTModel", "HybridModel")
_PROVIDER = "--custom-model-provider-path"


def _of_megatron(subject: Subject) -> tuple[Job, Sequence[Side]]:
    """A launch that says what it builds, and the Megatron checkpoints that it loads.

    Raises NotApplicable for any other.
    """
    job = job_of(subject)
    given = job.arguments
    if not given.describes_model or given.anything or not given.unknown.isdisjoint(PATTERNS):
        raise NotApplicable("the launch does not say which class of Megatron it builds")
    if job.bridge or any(one.name == _PROVIDER for one in options_of(job.text.words)):
        raise NotApplicable("code of the launch's own builds the model")
    if sides := [side for side in job.sides if side.path and side.is_megatron and not is_legacy(side.path)]:
        return job, sides
    raise NotApplicable("the launch loads no checkpoint in torch_dist")


@check("CK748", applies_to=_of_megatron)
def class_matches(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """HybridModel where the launch has a layer pattern, else GPTModel, against the names in each checkpoint.

    Megatron-LM tells the two apart in the same way. A launch of HybridModel is also held against what it cannot be.
    """
    job, sides = _of_megatron(subject)
    builds = stored_pattern(job.arguments.known) is not None
    for side in {side.path: side for side in sides if side.path}.values():
        tally.compared()
        yield from _against(side.path or Path(), builds)
    config = engine_config(job.hf) if builds and job.hf else {}
    if config:
        yield from _impossible(config, job)


def _against(path: Path, builds: bool) -> Iterator[Issue]:
    files = Subject(path).megatron_files
    try:
        holds = files.hybrid
    except UnsupportedError:
        raise
    except CkptkitError:  # CK111 reports it
        return
    if holds == builds:
        return
    dialect = "hybrid" if builds else "mcore"
    hint = f"convert it: `ckptkit convert {path} OUT --dialect {dialect}`"
    severity: Severity = "error"
    known = quirk("megatron", "stacked-layers")
    if builds and known is not None and any(_STACKED.match(key) for key in files.metadata.tensors):
        severity = "warning"
        hint += f"; {known.message}"
    expected, actual = f"a {_CLASSES[builds]}, as the launch builds", f"a {_CLASSES[holds]}"
    yield Issue(expected, actual, hint, file=path, severity=severity)


def _impossible(config: Any, job: Job) -> Iterator[Issue]:
    try:
        dims = dims_of(config)
    except UnsupportedError:
        raise
    except CkptkitError:  # CK101 reports it
        return
    reasons = list(gpt_only(dims))
    if dims.tied and "/" in (job.actor.pattern or "") and (job.actor.pp or 1) > 1:
        reasons.append(
            "tied embeddings with multi-token prediction over several pipeline stages, which megatron-core neither "
            "saves nor loads"
        )
    for reason in reasons:
        yield Issue(
            f"a model that HybridModel can hold, in {job.hf}",
            reason,
            "build GPTModel (leave out --hybrid-layer-pattern, and start pretrain_gpt.py), or for several stages leave "
            "multi-token prediction out",
        )
