"""CK722: the GPUs of a job of verl, NeMo-RL or ROLL, against the sizes that each role cuts its model into."""

from __future__ import annotations

from collections.abc import Iterator

from verify.check import Skip, Tally, check
from verify.checks.launch.engine import unless_skipped
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.launch.stacks.launched import Stacked


def _stack(subject: Subject) -> Stacked:
    if subject.launch is None or subject.launch.stack is None:
        raise Skip("only settings of verl, NeMo-RL and ROLL say both GPUs and sizes")
    return subject.launch.stack


@check(
    "CK722",
    "the GPUs of every role divide by its parallel sizes",
    stage="launch",
    rationale=(
        "Nodes, GPUs and sizes stand in different places of a configuration, and each framework checks them only "
        "after its workers were started."
    ),
    fix="Make nodes x GPUs a multiple of tp x pp x cp, and of ep x etp x pp; those of an engine of its tp x pp.",
    unless=unless_skipped(_stack),
)
def gpus_divide(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Nodes x GPUs against tp x pp x cp and ep x etp x pp of every role; sizes that roles of one process share."""
    stack = _stack(subject)
    groups = [group for group in stack.groups if group.gpus.count is not None and group.products]
    if not groups and not stack.issues:
        raise Skip("the number of GPUs, or a size, is not known")
    for group in groups:
        tally.compared(0, len(group.products))
        yield from group.issues()
    yield from stack.issues
