"""CK121: the optimizer state that a training run saved is whole. No value is read."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.formats.torch_dist.optimizer import MASTERS, OptimizerState, is_flattened
from verify.check import Tally, check
from verify.checks.headers.files import names_of
from verify.evidence.optimizer import state_of
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.skip import Inapplicable

SAVED_AGAIN = "save it again from the run, or resume without the optimizer (--no-load-optim, --finetune)"
AS_OBJECTS = "the optimizer state is stored as objects (dp_zero_gather_scatter), which are not looked into"
_ADAM = ("exp_avg", "exp_avg_sq")


def no_optimizer(subject: Subject) -> str | None:
    """For checks of optimizer state."""
    try:
        stored = subject.is_megatron and not subject.once(state_of).is_empty
    except UnsupportedError:
        stored = False
    except CkptkitError as error:
        return error.message
    return None if stored else "no optimizer state is stored"


@check(
    "CK121",
    "every parameter has its optimizer state",
    stage="headers",
    rationale="A run that resumes without a part of its optimizer state stops, or goes on with moments of zero and a "
    "learning rate that was chosen for others.",
    fix="Save again from the run. If the weights alone are wanted, resume with --no-load-optim or convert: `convert` "
    "leaves the optimizer out.",
    unless=no_optimizer,
)
def optimizer_whole(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Each weight has a master weight and moments of its shape, where others have them; each bucket has all kinds."""
    names_of(subject)
    state = subject.once(state_of)
    if state.opaque and not (state.by_weight or state.buckets):
        raise Inapplicable(AS_OBJECTS)
    where = subject.megatron_files.weights / ".metadata"
    tally.compared(0, len(state.by_weight) + len(state.buckets))
    unnamed = ("state of weights that are stored", "there is no weight of this name", state.unknown)
    for expected, actual, names in (unnamed, *_by_weight(state), *_by_bucket(state)):
        yield Issue(expected, actual, SAVED_AGAIN, names=names, file=where)
    frozen = f"right where the run does not train all of them; else {SAVED_AGAIN}"
    yield Issue("optimizer state", "none", frozen, names=_without(state), file=where, severity="warning")
    if few := _too_few(state):
        yield Issue(f"state of {few[0]} elements of weights", f"of {few[1]}", frozen, file=where, severity="warning")


_Problem = tuple[str, str, Collection[str]]


def _without(state: OptimizerState) -> list[str]:
    """Weights that nothing is stored of, while others have state under their names."""
    return [key for key in state.weights if key not in state.by_weight] if state.by_weight else []


def _by_weight(state: OptimizerState) -> Iterator[_Problem]:
    kinds = {kind for found in state.by_weight.values() for kind in found}
    masters = kinds.intersection(MASTERS)
    for key, found in state.by_weight.items():
        moments = found.keys() - set(MASTERS)
        lacking = [kind for kind in _ADAM if kind in kinds.difference(found) and not moments.isdisjoint(_ADAM)]
        if masters.isdisjoint(found) and masters and state.weights[key].dtype != "float32":
            lacking.append("master weights")
        for what in lacking if moments else [*lacking, "moments"]:
            yield f"{what}, as other parameters have", "there are none", [key]
        shape = state.weights[key].shape
        for one in found.values():
            if one.shape != shape and not is_flattened(shape, one.shape):
                yield f"{list(shape)}, the shape of its weight", f"{list(one.shape)}", [one.key]


def _by_bucket(state: OptimizerState) -> Iterator[_Problem]:
    kinds = {kind for bucket in state.buckets for kind in bucket.kinds}
    for bucket in state.buckets:
        if missing := kinds - bucket.kinds.keys():
            yield f"{', '.join(sorted(missing))}, as other buckets have", "there is none", [bucket.key]
        if len(sizes := {one.shape for one in bucket.kinds.values()}) > 1:
            yield "as many elements of each kind", f"{', '.join(map(str, sorted(map(math.prod, sizes))))}", [bucket.key]


def _too_few(state: OptimizerState) -> tuple[int, int] | None:
    """Elements of weights and of their state, where buckets alone hold it and there are fewer of the second."""
    expected = sum(math.prod(one.shape) for one in state.weights.values())
    found = sum(max(math.prod(one.shape) for one in bucket.kinds.values()) for bucket in state.buckets)
    return (expected, found) if found < expected and not state.opaque and not state.by_weight else None
