"""CK746: options of a launch that do not go together, and that the trainer accepts in silence or only counts late."""

from __future__ import annotations

from collections.abc import Iterator

from verify.check import Skip, Tally, check
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.launch.checks.engine import job_of, unless_skipped


def _combinations(subject: Subject) -> tuple[Issue, ...]:
    """The combinations that the stack's reader found. Raises Skip where no such rule is known."""
    if (issues := job_of(subject).combinations) is None:
        raise Skip(
            "the launch is not one of slime, miles, ROLL or verl's main_ppo, whose combinations of options are known"
        )
    return issues


@check(
    "CK746",
    "the options of the launch go together",
    stage="launch",
    rationale=(
        "Trainers accept options that contradict one another: samples that no step trains on, a run that ends without "
        "a step, an adapter that only one of trainer and engine has. Sizes of batches are counted once GPUs are booked."
    ),
    fix="Change the options that the finding names.",
    unless=unless_skipped(_combinations),
)
def options_go_together(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Arithmetic of batches, rollouts of a run that resumes, adapters, and what only warns in a trainer's log."""
    tally.compared(0)
    yield from _combinations(subject)
