"""The GPUs of a job of verl, NeMo-RL or ROLL, against the sizes that each role cuts its model into; part of CK722."""

from __future__ import annotations

from collections.abc import Iterator

from verify.check import Skip, Tally
from verify.issue import Issue
from verify.launch.stacks.launched import Stacked


def of_stack(stack: Stacked, tally: Tally) -> Iterator[Issue]:
    """Nodes x GPUs against tp x pp x cp and ep x etp x pp of every role; sizes that roles of one process share.

    Raises Skip where neither is known.
    """
    groups = [group for group in stack.groups if group.gpus.count is not None and group.products]
    if not groups and not stack.issues:
        raise Skip("the number of GPUs, or a size, is not known")
    tally.compared(0, len(stack.issues))
    for group in groups:
        tally.compared(0, len(group.products))
        yield from group.issues()
    yield from stack.issues
