"""Megatron's own reader of torch_dist, which also notes what it was told to read, in a process group or by one rank.

Loading a checkpoint needs no word from other ranks. torch's `fake` backend has all the groups of a world of any size
and no other process behind them, so what a rank is follows from Megatron's own `initialize_model_parallel`. What a
collective would return is wrong there, so nothing may call one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.distributed import checkpoint
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptkit.converters.megatron.parallel import ParallelSizes
from ckptkit.formats.torch_dist.names import second_names
from ckptkit.verify.witnesses.megatron.imports import importing_megatron
from ckptkit.verify.witnesses.megatron.job import Box

with importing_megatron():
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    from ckptkit.verify.witnesses.megatron.model import lay_out, pretend_cuda


class WatchedLoad(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """A load strategy for `dist_checkpointing.load`.

    After it, `asked` has every key on disk that this rank read: the boxes of tensors, none for objects. `alone`: there
    are no other ranks to plan the reading with.

    What a trainer saved has Transformer Engine's names of norms alone, and Megatron's local spec asks for others. Those
    norms are read by the names on disk; `renamed` has the names that were asked for, and of which key each is the
    second.
    """

    def __init__(self, alone: bool = False) -> None:
        super().__init__()
        self.asked: dict[str, list[Box]] = {}
        self.alone = alone
        self.renamed: dict[str, str] = {}
        self._second: dict[str, str] = {}

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
        """As Megatron's, with the second name of every norm that is stored by Transformer Engine's name alone."""
        found = super().load_sharded_metadata(checkpoint_dir)
        stored = {one.key: one for one in found.values() if isinstance(one, ShardedTensor)}
        self._second = {name: key for name, key in second_names(stored).items() if name not in stored}
        return {**found, **{name: replace(stored[key], key=name) for name, key in self._second.items()}}

    def load(self, sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's."""
        for wanted in nested_values(sharded_state_dict):
            if wanted.key in self._second:
                self.renamed[wanted.key] = wanted.key = self._second[wanted.key]
            boxes = self.asked.setdefault(wanted.key, [])
            if isinstance(wanted, ShardedTensor):
                sizes = (*[1] * wanted.prepend_axis_num, *wanted.local_shape)
                boxes.append(Box(tuple(wanted.global_offset), sizes, is_main_replica(wanted.replica_id)))
        with without_collectives() if self.alone else nullcontext():
            return super().load(sharded_state_dict, *args, **kwargs)


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
