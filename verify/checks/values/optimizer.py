"""CK121, CK213 and CK214: the optimizer state of a training run is complete and sound."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.formats.torch_dist.training_state import MASTERS, OptimizerState, is_flattened
from ckptkit.verify.checks.headers.files import names_of
from ckptkit.verify.checks.values.values import require_some
from ckptkit.verify.core.check import CheckResult, Issue, NotApplicable, Subject, check, warning_if
from ckptkit.verify.evidence.folding import by_key, group_by_pattern
from ckptkit.verify.evidence.optimizer import OptimizerValues, count_without_master, optimizer_values, state_of

# Arguments that keep weights in fewer bits than the saved ones, which then do not follow from masters by rounding.
_FEWER_BITS = ("fp8_param_gather", "fp8_param", "fp4_param_gather", "fp4_param")
_ADAM = ("exp_avg", "exp_avg_sq")
_Problem = tuple[str, str, Collection[str]]
SAVED_AGAIN = "save again from the training run, or resume without the optimizer (--no-load-optim, --finetune)"
AS_OBJECTS = "the optimizer state is stored as Python objects (dp_zero_gather_scatter), which ckptkit does not check"


def has_optimizer(subject: Subject) -> None:
    """Raises NotApplicable without optimizer state."""
    try:
        stored = subject.kind == "megatron" and not state_of(subject).is_empty
    except UnsupportedError:
        stored = False
    except CkptkitError as error:
        raise NotApplicable(error.message) from error
    if not stored:
        raise NotApplicable("the checkpoint has no optimizer state")


@check("CK213", applies_to=has_optimizer)
def optimizer_sound(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Every tensor of state is readable and finite, and second moments are not negative. This pass also feeds CK214."""
    values = _values(subject)
    for one in values.stats.values():
        result.compared(nbytes=one.nbytes)
    for reason, lost in by_key((reason, name) for name, reason in values.unreadable.items()).items():
        yield Issue("bytes that can be read", reason, "copy the file again", names=lost, as_one=True)
    wrong = [name for name, one in values.stats.items() if not one.finite]
    yield Issue("finite values", "NaN or infinity", SAVED_AGAIN, names=wrong)
    wrong = [name for name, one in values.stats.items() if one.kind == "exp_avg_sq" and one.low < 0]
    yield Issue("squares, which are never negative", "negative numbers", SAVED_AGAIN, names=wrong)
    kinds = by_key((one.kind, name) for name, one in values.stats.items() if one.kind not in MASTERS)
    for names in kinds.values():  # a complete kind is an error, some parameters of it a warning
        zero = [name for name in names if values.stats[name].low == values.stats[name].high == 0]
        is_partial = len(zero) < len(names)
        if is_partial or subject.megatron_files.opened.common.get("iteration") != 0:
            hint = "check that these parameters got no gradients, like experts without tokens" * is_partial
            yield Issue("moments of a trained weight", "all zero", hint, names=zero, severity=warning_if(is_partial))


def _values(subject: Subject) -> OptimizerValues:
    values = optimizer_values(subject)
    if not values.stats and not values.unreadable:
        raise NotApplicable(AS_OBJECTS)
    return values


@check("CK214", applies_to=has_optimizer)
def masters_round(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Each float32 master weight rounds to the stored weight.

    Buckets of a distributed optimizer have masters without names: no number may be more frequent among the weights
    than among the rounded masters.
    """
    values = _values(subject)
    if kept := [name for name in _FEWER_BITS if subject.megatron_files.args.get(name)]:
        raise NotApplicable(f"the run kept weights in fewer bits ({kept[0]}), which differ from rounded master weights")
    if not values.compared and not values.weights:
        raise NotApplicable("the checkpoint has no float32 master weights of 16-bit weights")
    require_some(result, values.compared or values.weights, "no optimizer state can be read", "CK213")
    expected = "master weights that round to the stored weights"
    unlike = {name: counts for name, counts in values.compared.items() if counts[0]}
    hint = "take another checkpoint: weights and optimizer are of different steps, or the save mixed them up"
    for names in group_by_pattern(unlike):
        share = sum(unlike[name][0] for name in names) / sum(unlike[name][1] for name in names)
        yield Issue(expected, f"{share:.2%} of the elements differ", hint, names=names)
    for dtype, weights in values.weights.items():
        if missing := count_without_master(values, dtype):
            actual = f"{missing} of {int(weights.sum())} {dtype} weights have no master weight that rounds to them"
            yield Issue(expected, actual, f"{hint}; if the run does not train all weights, ignore this")


@check("CK121", stage="headers", applies_to=has_optimizer)
def optimizer_whole(subject: Subject, result: CheckResult) -> Iterator[Issue]:
    """Each weight has a master and moments of its shape, if others have them; each bucket has all kinds of state."""
    names_of(subject)
    state = state_of(subject)
    if state.opaque and not (state.by_weight or state.buckets):
        raise NotApplicable(AS_OBJECTS)
    where = subject.megatron_files.weights / ".metadata"
    result.compared(len(state.by_weight) + len(state.buckets))
    unnamed = ("state of a stored weight", "the checkpoint has no weight of this name", state.unknown)
    for expected, actual, names in (unnamed, *_by_weight(state), *_by_bucket(state)):
        yield Issue(expected, actual, SAVED_AGAIN, names=names, file=where)
    frozen = f"ignore this if the run does not train these weights; else {SAVED_AGAIN}"
    unsaved = [key for key in state.weights if key not in state.by_weight] if state.by_weight else []
    yield Issue("optimizer state of the weight", "missing", frozen, names=unsaved, file=where, severity="warning")
    elements = sum(math.prod(one.shape) for one in state.weights.values())
    covered = sum(max(math.prod(one.shape) for one in bucket.kinds.values()) for bucket in state.buckets)
    if covered < elements and not state.opaque and not state.by_weight:  # only buckets have the state
        actual = f"state of {covered} elements"
        yield Issue(f"state of {elements} elements of weights", actual, frozen, file=where, severity="warning")


def _by_weight(state: OptimizerState) -> Iterator[_Problem]:
    kinds = {kind for parts in state.by_weight.values() for kind in parts}
    masters = kinds.intersection(MASTERS)
    for key, parts in state.by_weight.items():
        moments = parts.keys() - set(MASTERS)
        lacking = [kind for kind in _ADAM if kind in kinds.difference(parts) and not moments.isdisjoint(_ADAM)]
        if masters.isdisjoint(parts) and masters and state.weights[key].dtype != "float32":
            lacking.append("master weights")
        for what in lacking if moments else [*lacking, "moments"]:
            yield f"{what} of the weight, as other weights have", "missing", [key]
        shape = state.weights[key].shape
        for one in parts.values():
            if one.shape != shape and not is_flattened(shape, one.shape):
                yield f"shape {list(shape)}, that of the weight", f"shape {list(one.shape)}", [one.key]


def _by_bucket(state: OptimizerState) -> Iterator[_Problem]:
    kinds = {kind for bucket in state.buckets for kind in bucket.kinds}
    for bucket in state.buckets:
        if missing := kinds - bucket.kinds.keys():
            yield f"{', '.join(sorted(missing))} in the bucket, as in others", "missing", [bucket.key]
        if len(sizes := {one.shape for one in bucket.kinds.values()}) > 1:
            actual = " and ".join(map(str, sorted(map(math.prod, sizes))))
            yield "the same number of elements for each kind of state", f"{actual} elements", [bucket.key]
