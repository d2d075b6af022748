"""CK740, CK748: the checkpoints of a launch have one architecture, in the model class that the launch builds."""

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
from ckptkit.verify.core.check import CheckResult, check
from ckptkit.verify.core.issue import Issue, warning_if
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

# slime and miles replace the output layer of a critic.
_CRITIC_ARGUMENTS = ("untie_embeddings_and_output_weights", "vocab_size", "padded_vocab_size")
_NAMED = 3

Shapes = Mapping[str, "tuple[int, ...] | None"]
# Tensors that differ between two checkpoints, and arguments with both values.
_Differences = tuple[list[str], list[tuple[str, str, str]]]


def describe_difference(arguments: Sequence[str], tensors: int) -> str:
    """Lists the first arguments, the number of further arguments, and the number of tensors that differ."""
    more = len(arguments) - _NAMED
    parts = [*arguments[:_NAMED], *([f"{more} more argument{'s' * (more > 1)}"] if more > 0 else [])]
    return ", ".join([*parts, *([f"{tensors} tensors with other names or shapes"] if tensors else [])])


def _roles(subject: Subject) -> tuple[Mapping[str, Any], list[Side]]:
    """The launch's config, or {}, and the sides that only CK740 compares. Raises NotApplicable without any."""
    job = job_of(subject)
    if not job.stack.one_model:
        raise NotApplicable("in this launch each role has a config of its own")
    config = engine_config(job.hf) if job.hf else {}
    sides: dict[Path, Side] = {}
    for side in job.sides:
        if side.path and side.role != ENGINE:
            sides.setdefault(side.path, side)
    if config:
        others = [side for side in sides.values() if side.role in ("critic", "teacher")]
        if not others:
            raise NotApplicable("the launch loads neither a separate critic nor a separate teacher")
        return config, others
    if len(sides) < 2:
        raise NotApplicable("the launch has neither --hf-checkpoint nor two checkpoints to compare")
    return {}, list(sides.values())


@check("CK740", needs=("sound headers",), applies_to=_roles)
def one_architecture(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Compares names and shapes of tensors, and stored arguments, with --hf-checkpoint, or else with the first side."""
    config, sides = _roles(subject)
    first, hf = sides[0], job_of(subject).hf
    source = f"{hf}/config.json" if config else f"the {first.role}, {first.path}"
    for side in sides if config else sides[1:]:
        result.compared()
        if why := _incomparable(side, None if config else first):
            result.note(f"architectures were not compared: {why}")
            continue
        try:
            tensors, arguments = _from_config(side, config, hf) if config else _from_side(first, side)
        except UnsupportedError:
            raise
        except CkptkitError as error:
            yield Issue("readable headers", error.message, error.hint or "copy the file again", file=side.path)
            continue
        if tensors or arguments:
            hint = f"set the {side.role} to a checkpoint of the model that the launch trains"
            values = [f"{name} = {actual} instead of {expected}" for name, expected, actual in arguments]
            actual = f"another model: {describe_difference(values, len(tensors))}"
            yield Issue(f"the model of {source}", actual, hint, tensors or None, side.path, as_one=True)


def differ_in_architecture(subject: Subject, first: Side, side: Side) -> bool:
    """Whether CK740 finds that two sides of a launch without a config are of different models."""
    job = job_of(subject)
    if not job.stack.one_model or job.hf or _incomparable(side, first):
        return False
    try:
        return any(_from_side(first, side))
    except CkptkitError:
        return False


def _incomparable(side: Side, first: Side | None) -> str | None:
    """The reason why a side is not compared, or None."""
    if any(is_legacy(one.path) for one in (side, first) if one and one.path):
        return f"the {side.role} is in Megatron's legacy format"
    if first and first.kind != side.kind:
        return f"{first.role} and {side.role} are in two formats, and --hf-checkpoint was not given"
    return None


def _from_config(side: Side, config: Mapping[str, Any], hf: Path | None) -> _Differences:
    """The differences of a side from the launch's config. Raises CkptkitError if the side cannot be read."""
    critic, path = side.role == "critic", side.path or Path()
    if side.kind == "hf":
        expected, actual = (comparable_args(dims_of(one)) for one in (config, SideFiles(path).config))
        pairs = [(name, str(expected.get(name)), str(actual.get(name))) for name in sorted({**expected, **actual})]
        return [], _for_role((one for one in pairs if expected.get(one[0]) != actual.get(one[0])), critic)
    subject = Subject(path, hf_path=hf)
    model, args = expected_of(subject), subject.megatron_files.args
    dims = dims_of(config) if args.get("mtp_num_layers") else replace(dims_of(config), mtp_layers=0)
    shapes = {name: spec.shape for name, spec in subject.specs.items()}
    tensors = _different_shapes(model.shapes, shapes, critic) if model else []
    return tensors, _for_role(mismatches(dims, args) if args else (), critic)


def _from_side(first: Side, side: Side) -> _Differences:
    """The differences of a side from the first one in the same format. Raises CkptkitError as `_from_config`."""
    subjects = [Subject(one.path or Path()) for one in (first, side)]
    specs = ({name: spec for name, spec in one.specs.items() if LAYER.search(name)} for one in subjects)
    expected, actual = ({name: spec.shape for name, spec in one.items()} for one in specs)
    critic = side.role == "critic"
    tensors = _different_shapes(expected, actual, critic)
    if side.kind == "hf":
        # Packed tensors have different names.
        return [name for name in tensors if name in expected and name in actual], []
    args = [one.megatron_files.args for one in subjects]
    return tensors, _for_role(differing(*args) if all(args) else (), critic)


def _for_role(arguments: Iterable[tuple[str, str, str]], critic: bool) -> list[tuple[str, str, str]]:
    return [one for one in arguments if not (critic and one[0] in _CRITIC_ARGUMENTS)]


def _different_shapes(expected: Shapes, actual: Shapes, critic: bool) -> list[str]:
    """Names in only one of two checkpoints, or with different shapes. The vocabulary of `actual` may be padded."""
    names = [name for name in {**expected, **actual} if not (critic and name.startswith("output_layer."))]
    return [name for name in names if not _same_shape(name, expected, actual)]


def _same_shape(name: str, expected: Shapes, actual: Shapes) -> bool:
    if name not in expected or name not in actual:
        return False
    want, have = expected[name], actual[name]
    if want is None or have is None:
        return True
    is_padded = name.startswith(("embedding.", "output_layer.")) and have[:1] > want[:1]
    return want[1:] == have[1:] if is_padded else want == have


_STACKED = re.compile(r"decoder\.layers\.(?!\d+\.)")  # keys that stack the tensors of several layers
_CLASSES = ("GPTModel", "HybridModel")
_PROVIDER = "--custom-model-provider-path"


def _megatron_sides(subject: Subject) -> tuple[Job, Sequence[Side]]:
    """A launch that describes its model, and the Megatron checkpoints that it loads. Raises NotApplicable otherwise."""
    job = job_of(subject)
    given = job.arguments
    if not given.describes_model or given.anything or not given.unknown.isdisjoint(PATTERNS):
        raise NotApplicable("the launch does not show which Megatron class it builds")
    if job.bridge or any(one.name == _PROVIDER for one in options_of(job.text.words)):
        raise NotApplicable("custom code builds the model")
    if sides := [side for side in job.sides if side.path and side.kind == "megatron" and not is_legacy(side.path)]:
        return job, sides
    raise NotApplicable("the launch loads no checkpoint in torch_dist")


@check("CK748", applies_to=_megatron_sides)
def class_matches(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Checks for HybridModel with a layer pattern, else GPTModel, as Megatron-LM; and that it supports the config."""
    job, sides = _megatron_sides(subject)
    is_hybrid = stored_pattern(job.arguments.known) is not None
    for path in dict.fromkeys(side.path for side in sides if side.path):
        result.compared()
        yield from _other_class(path, is_hybrid)
    config = engine_config(job.hf) if is_hybrid and job.hf else {}
    if config:
        yield from _impossible_hybrid(config, job)


def _other_class(path: Path, is_hybrid: bool) -> Iterator[Issue]:
    files = Subject(path).megatron_files
    try:
        is_stored_hybrid = files.hybrid
    except UnsupportedError:
        raise
    except CkptkitError:  # CK111 reports it
        return
    if is_stored_hybrid == is_hybrid:
        return
    hint = f"convert the checkpoint: `ckptkit convert {path} OUT --dialect {'hybrid' if is_hybrid else 'mcore'}`"
    known = quirk("megatron", "stacked-layers")
    is_loaded = is_hybrid and known is not None and any(_STACKED.match(key) for key in files.metadata.tensors)
    hint += f"; {known.message}" if is_loaded and known else ""
    expected, actual = f"a {_CLASSES[is_hybrid]}, as the launch builds", f"a {_CLASSES[is_stored_hybrid]}"
    yield Issue(expected, actual, hint, file=path, severity=warning_if(is_loaded))


def _impossible_hybrid(config: Any, job: Job) -> Iterator[Issue]:
    try:
        dims = dims_of(config)
    except UnsupportedError:
        raise
    except CkptkitError:  # CK101 reports it
        return
    reasons = list(gpt_only(dims))
    if dims.tied and "/" in (job.actor.pattern or "") and (job.actor.pp or 1) > 1:
        several_stages = "tied embeddings with multi-token prediction over several pipeline stages"
        reasons.append(f"{several_stages}, which megatron-core neither saves nor loads")
    gpt = "build a GPTModel (leave out --hybrid-layer-pattern and start pretrain_gpt.py)"
    hint = f"{gpt}, or leave out multi-token prediction if it needs several stages"
    yield from (Issue(f"a model that HybridModel supports, in {job.hf}", reason, hint) for reason in reasons)
