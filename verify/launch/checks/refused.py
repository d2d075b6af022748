"""CK746: what the trainer's own check of its arguments, or Megatron's, refuses."""

from __future__ import annotations

from collections.abc import Iterator

from verify.check import Skip, Tally, check
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.launch.checks.engine import job_of, unless_skipped
from verify.launch.job import OwnCheck


def _own_check(subject: Subject) -> OwnCheck:
    """What the stack's own check makes of the job. Raises Skip where it has nothing to look at."""
    found = job_of(subject).own_check
    if found.skip_reason:
        raise Skip(found.skip_reason)
    return found


@check(
    "CK746",
    "the trainer's own check accepts the arguments",
    stage="launch",
    rationale=(
        "slime, miles, verl, NeMo-RL, ROLL and Megatron stop at arguments that contradict one another: minutes after "
        "the GPUs were booked, or in the first step of training."
    ),
    fix="Change the arguments that the finding names.",
    unless=unless_skipped(_own_check),
)
def arguments_accepted(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Arithmetic of batches, options that need or exclude another one, and Megatron's rules (`verify/launch/rules`)."""
    found = _own_check(subject)
    if found.unknown:
        raise Skip(found.unknown)
    tally.compared(0, found.arguments)
    yield from found.issues
