"""One rank of a world of any size, in a process by itself: loading a checkpoint needs no word from other ranks.

torch's `fake` backend has all the groups of the world and no other process behind them, so what a rank is follows from
Megatron's own `initialize_model_parallel`. What a collective would return is wrong there, so nothing may call one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import torch
from torch.distributed import checkpoint
from torch.testing._internal.distributed.fake_pg import FakeStore

from converters.megatron.parallel import ParallelSizes
from verify.witnesses.megatron.imports import importing_megatron

with importing_megatron():
    from verify.witnesses.megatron.model import lay_out, pretend_cuda


def connect_alone(sizes: ParallelSizes, rank: int) -> None:
    """Makes this process the rank `rank` of a world of these sizes that has no others. On the CPU only."""
    pretend_cuda()
    torch.distributed.init_process_group("fake", rank=rank, world_size=sizes.world, store=FakeStore())
    lay_out(sizes, gloo=False)


@contextmanager
def without_collectives() -> Iterator[None]:
    """Within the context torch's checkpoint reader plans for this rank alone, as Megatron has it do from 0.19 on.

    Before, rank 0 gathered the plans of all ranks; reading never used those of the others.
    """
    with ExitStack() as stack:
        for name in ("load", "load_state_dict"):
            reads = getattr(checkpoint, name)
            stack.enter_context(mock.patch.object(checkpoint, name, partial(reads, no_dist=True)))
        yield
