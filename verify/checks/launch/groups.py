"""The GPUs of a job of verl, NeMo-RL or ROLL, against the sizes that each role cuts its model into; part of CK722."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verify.check import Skip, Tally
from verify.checks.launch.engine import engine_config, engine_dims
from verify.checks.launch.fit import EngineRanks, dtensor_fit, engine_fit, sequence_fit
from verify.issue import Issue
from verify.launch.cluster import lent, short
from verify.launch.stacks.launched import Stacked
from verify.launch.stacks.sizes import Cut, Gpus
from verify.launch.words import Word


def of_stack(stack: Stacked, tally: Tally, words: Sequence[Word] = ()) -> Iterator[Issue]:
    """Nodes x GPUs against tp x pp x cp and ep x etp x pp of every role; sizes that roles of one process share.

    Then the model's heads and experts, over the ranks of engines and of trainers without Megatron. Raises Skip where
    none of them is known.
    """
    groups = [group for group in stack.groups if group.gpus.count is not None and group.products]
    roots = [(cut, stack.models.get(cut.role, stack.hf)) for cut in stack.cuts]
    cuts = [(cut, config) for cut, root in roots if root is not None and (config := engine_config(root))]
    if not groups and not stack.issues and not cuts:
        raise Skip("the number of GPUs, or a size, is not known")
    tally.compared(0, len(stack.issues))
    for group in groups:
        tally.compared(0, len(group.products))
        yield from group.issues()
    yield from stack.issues
    needed = max((group.gpus for group in groups), key=lambda gpus: gpus.count or 0, default=Gpus())
    places = [*stack.keys.values(), *words]
    yield from short((one for one in lent(places) if one.alone), needed.count or 0, 0, f"for {needed.said}")
    for cut, config in cuts:
        tally.compared(0)
        yield from _shared_out(cut, config)


def _shared_out(cut: Cut, config: Mapping[str, Any]) -> Iterator[Issue]:
    dims = engine_dims(config)
    if cut.by == "ulysses":
        yield from sequence_fit(dims, cut.ranks, cut.where)
    elif cut.by == "dtensor":
        yield from dtensor_fit(dims, cut.ranks, cut.where)
    else:
        ranks = EngineRanks(cut.by, cut.ranks, cut.ep, cut.ranks, cut.ranks, option=cut.where, ep_option="ep_size")
        if cut.ranks % cut.ep == 0:
            yield from engine_fit(dims, config, ranks)
