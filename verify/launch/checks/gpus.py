"""CK722: the GPUs of a launch divide over its parallel sizes, and the model over the ranks of its engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from verify.check import Skip, Tally, check
from verify.evidence.subject import Subject
from verify.issue import Issue
from verify.launch.checks.engine import engine_config, engine_dims, job_of, unless_skipped
from verify.launch.checks.fit import dtensor_fit, engine_fit, sequence_fit
from verify.launch.stacks.sizes import Cut, Placement
from verify.launch.words import at_places, first_file


def _placement(subject: Subject) -> Placement:
    """How the sizes of the job go with its GPUs. Raises Skip for a launch that counts none."""
    if (placement := job_of(subject).placement) is None:
        raise Skip("the launch counts no GPUs")
    return placement


@check(
    "CK722",
    "the GPUs of the launch divide over its parallel sizes",
    stage="launch",
    rationale=(
        "Megatron and SGLang stop with an assertion minutes after the GPUs were booked, or leave some of them idle."
    ),
    fix="Choose nodes, GPUs a node, and parallel sizes that divide one another, as the finding says.",
    unless=unless_skipped(_placement),
)
def gpus_divide(subject: Subject, tally: Tally) -> Iterator[Issue]:
    """Nodes x GPUs against tp x pp x cp and ep x etp x pp of every role; sizes that roles of one process share.

    Then the model's heads, experts and FP8 blocks, over the ranks of engines and of trainers without Megatron.
    """
    placement, job = _placement(subject), job_of(subject)
    groups = [group for group in placement.groups if group.gpus.count is not None and group.products]
    roots = [(cut, job.models.get(cut.role, job.hf)) for cut in placement.cuts]
    cuts = [(cut, config) for cut, root in roots if root is not None and (config := engine_config(root))]
    if not (placement.counted or groups or placement.issues or cuts):
        raise Skip("the number of GPUs, or a size, is not known")
    conditions = len(cuts) + sum(len(group.products) for group in groups)
    tally.compared(0, max(conditions + (0 if placement.counted else len(placement.issues)), 1))
    for group in groups:
        yield from group.issues()
    yield from placement.issues
    for cut, config in cuts:
        for issue in _shared_out(cut, config):
            file = first_file(cut.words) or issue.file or cut.file
            yield replace(issue, expected=f"{issue.expected}{at_places(cut.words)}", file=file)


def _shared_out(cut: Cut, config: Mapping[str, Any]) -> Iterator[Issue]:
    dims = engine_dims(config)
    if cut.by == "ulysses":
        yield from sequence_fit(dims, cut.ranks, cut.where)
    elif cut.by == "dtensor":
        yield from dtensor_fit(dims, cut.ranks, cut.where)
    elif cut.ranks % cut.ep == 0:
        yield from engine_fit(dims, config, cut)
