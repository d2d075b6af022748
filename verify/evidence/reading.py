"""Reads all the bytes of a checkpoint and its source in one pass, with few tensors in memory: threads, or Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.progress import progress
from converters.experts import is_fused
from converters.foreign import refuse_foreign, refuse_stated
from verify.evidence.on_ray import parts_on_ray
from verify.evidence.subject import Subject
from verify.evidence.values import Groups, Values, common_groups, look, sides

_MEMORY = 8 << 30  # bytes of tensors in memory over all threads; a single group may need more


def read_values(subject: Subject) -> Values:
    """Reads everything once, group by group. With a source, both sides are seen as HF and compared as they come by."""
    return _pass(subject, stored=False)


def stored_values(subject: Subject) -> Values:
    """The same of every tensor under its name on disk: from the one pass where that is how it names them."""
    fused = subject.is_hf and is_fused(subject.checkpoint.specs)
    if not fused and (subject.is_hf or subject.source_path is None):
        return subject.once(read_values)
    return _pass(subject, stored=True)


def _pass(subject: Subject, stored: bool) -> Values:
    if subject.is_hf:
        refuse_foreign(subject.checkpoint.specs, subject.path)
        refuse_stated(subject.checkpoint.config, subject.path)
    checkpoint, source = sides(subject, stored)
    specs, values = checkpoint.specs, Values()
    groups = list(common_groups(checkpoint, source))
    if source is not None:
        values.only_source = [name for name in source.specs if name not in specs]
        values.only_here = [name for name in specs if name not in source.specs]
    with (
        progress("reading values", sum(spec.nbytes for spec in specs.values())) as advance,
        _parts(subject, stored, checkpoint, source, groups) as parts,
    ):
        for part in parts:
            values.add(part)
            advance(sum(stats.nbytes for stats in part.stats.values()))
    return values


@contextmanager
def _parts(
    subject: Subject, stored: bool, checkpoint: Checkpoint, source: Checkpoint | None, groups: Groups
) -> Iterator[Iterator[Values]]:
    """What is found of the groups, in their order: by threads, or by tasks on a Ray cluster."""
    if subject.options.ray is not None:
        with closing(parts_on_ray(subject, stored, checkpoint, groups)) as parts:
            yield parts
        return
    largest = max((sum(checkpoint.specs[name].nbytes for name in names) for names in groups), default=0)
    with threads(largest) as pool:
        yield pool.map(partial(look, checkpoint, source), groups)


@contextmanager
def threads(largest: int) -> Iterator[Executor]:
    """A thread a core, memory permitting, each with one thread of torch's: more would only be in their way.

    `largest`: bytes of the largest group of tensors on one side.
    """
    import torch

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(_workers(largest), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def _workers(largest: int) -> int:
    """Threads to read and digest with (both let other threads run): as many as there are cores, memory permitting."""
    # Both sides and what is computed from them are in memory at a time, for every thread.
    return max(1, min(os.cpu_count() or 1, _MEMORY // (3 * largest or 1)))
