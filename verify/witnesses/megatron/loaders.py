"""Megatron's own loading of torch_dist, recorded: by megatron-core in a process group or by one rank, and by a trainer.

Loading a checkpoint needs no communication. torch's `fake` backend has all the groups of a world of any size and no
other process, so Megatron's own `initialize_model_parallel` places a single rank in it. Nothing may call a collective
there, since its results are wrong. A trainer calls `load_checkpoint` of `megatron.training`, which comes with
megatron-core since 0.19. It runs with patches of torch for its process.
"""

from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.distributed import checkpoint
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.megatron.arguments import launch_flags, megatron_args
from ckptkit.converters.megatron.parallel import ParallelSizes
from ckptkit.converters.planner import HYBRID, MCORE
from ckptkit.formats.torch_dist.names import second_names
from ckptkit.verify.witnesses.megatron.imports import importing_megatron
from ckptkit.verify.witnesses.megatron.job import Box, RankJob

with importing_megatron():
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    from ckptkit.verify.witnesses.megatron.model import OnCpu, lay_out, pretend_cuda

# Properties that Megatron-LM reads of the GPU that it expects.
_HOPPER = SimpleNamespace(major=9, minor=0, name="cpu", total_memory=0, multi_processor_count=1)
# `raise_unexpected` requires every key that the model requests. `raise_all` would also refuse the names that only
# Transformer Engine's layers request, which a checkpoint for both has.
_RUN = (
    "--transformer-impl local --ckpt-format torch_dist --dist-ckpt-strictness raise_unexpected --no-load-optim "
    "--no-load-rng --micro-batch-size 1 --seq-length 8 --train-iters 1 --lr 1e-4 --tokenizer-type NullTokenizer "
    "--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion "
    "--use-cpu-initialization --distributed-backend gloo"
)
_DTYPES = {"bfloat16": ["--bf16"], "float16": ["--fp16"]}


class WatchedLoad(TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """A load strategy for `dist_checkpointing.load`. `alone`: there are no other ranks to plan the reading with."""

    def __init__(self, alone: bool = False) -> None:
        super().__init__()
        self.asked: dict[str, list[Box]] = {}  # by each key on disk that this rank read, without boxes for objects
        self.alone = alone
        # A trainer's checkpoint has only Transformer Engine's names of norms, and Megatron's local spec requests other
        # names. Those norms are read by the names on disk, to which this maps the requested ones.
        self.renamed: dict[str, str] = {}
        self._second: dict[str, str] = {}

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
        """Megatron's, with the second name of every norm that is stored only by Transformer Engine's name."""
        metadata = super().load_sharded_metadata(checkpoint_dir)
        stored = {one.key: one for one in metadata.values() if isinstance(one, ShardedTensor)}
        self._second = {name: key for name, key in second_names(stored).items() if name not in stored}
        return {**metadata, **{name: replace(stored[key], key=name) for name, key in self._second.items()}}

    def load(self, sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        for wanted in nested_values(sharded_state_dict):
            if wanted.key in self._second:
                self.renamed[wanted.key] = wanted.key = self._second[wanted.key]
            boxes = self.asked.setdefault(wanted.key, [])
            if isinstance(wanted, ShardedTensor):
                sizes = (*[1] * wanted.prepend_axis_num, *wanted.local_shape)
                boxes.append(Box(tuple(wanted.global_offset), sizes, is_main_replica(wanted.replica_id)))
        if not self.alone:
            return super().load(sharded_state_dict, *args, **kwargs)
        # torch's checkpoint reader plans without rank 0, as Megatron has it do from 0.19 on.
        names = ("load", "load_state_dict")
        loads: dict[str, Any] = {name: partial(getattr(checkpoint, name), no_dist=True) for name in names}
        with mock.patch.multiple(checkpoint, **loads):
            return super().load(sharded_state_dict, *args, **kwargs)


def connect_alone(sizes: ParallelSizes, rank: int) -> None:
    """Makes this process the only one of a world of these sizes, with the number `rank`. Only on the CPU."""
    pretend_cuda()
    torch.distributed.init_process_group("fake", rank=rank, world_size=sizes.world, store=FakeStore())
    lay_out(sizes, gloo=False)


def pretend_gpu() -> OnCpu:
    """Patches torch as Megatron-LM needs it without a GPU; the returned mode is for calls of its functions."""
    pretend_cuda()
    torch.cuda.get_device_properties = lambda device=None: _HOPPER  # type: ignore[assignment,return-value]
    torch.cuda.get_device_capability = lambda device=None: (_HOPPER.major, _HOPPER.minor)
    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.empty_cache = lambda: None
    return OnCpu()


def import_loader() -> Any:
    """Imports `megatron.training.checkpointing`. Raises ImportError if it, or a module that it imports, is missing."""
    with pretend_gpu(), importing_megatron():
        from megatron.training import arguments, checkpointing  # noqa: F401
    return checkpointing


def arguments_for(dims: ModelDims, job: RankJob) -> Namespace:
    """Megatron-LM's arguments, parsed and validated by itself, of a launch with the flags of this model."""
    from megatron.training.arguments import parse_args, validate_args

    sizes = job.sizes
    os.environ |= {"RANK": str(job.rank), "LOCAL_RANK": str(job.rank), "WORLD_SIZE": str(sizes.world)}
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # required wherever tensors are divided
    flags = launch_flags(megatron_args(dims, HYBRID if job.hybrid else MCORE))
    words = [word for flag in flags if not flag.startswith("#") for word in shlex.split(flag)]
    words += [*_RUN.split(), *_DTYPES.get(job.dtype, ()), "--load", str(job.trainer)]
    words += ["--global-batch-size", str(sizes.world)]
    words += ["--tensor-model-parallel-size", str(sizes.tp), "--pipeline-model-parallel-size", str(sizes.pp)]
    words += ["--expert-model-parallel-size", str(sizes.ep), "--expert-tensor-parallel-size", str(sizes.etp)]
    sys.argv = ["pretrain", *words]
    args: Namespace = parse_args()
    validate_args(args)
    return args


def load_as_trainer(chunks: Sequence[Any], args: Namespace, reader: WatchedLoad) -> list[str]:
    """Loads with `load_checkpoint`, which raises AssertionError for other arguments. Returns the refused names."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine
    from megatron.training import checkpointing
    from megatron.training.global_vars import set_args

    refused: list[str] = []
    for chunk in chunks:  # a strict load that failed is repeated without strictness
        _record_refused(chunk, refused)
    set_args(args)
    init_num_microbatches_calculator(args.rank, None, args.global_batch_size, 1, args.data_parallel_size)
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    # Its options concern repeated loads and FP8, and are off by default.
    with mock.patch.object(checkpointing, "TorchDistLoadShardedStrategy", return_value=reader):
        checkpointing.load_checkpoint(chunks, None, None, strict=True)
    return refused


def _record_refused(chunk: Any, refused: list[str]) -> None:
    load = chunk.load_state_dict

    def recorded(*args: Any, **kwargs: Any) -> Any:
        outcome = load(*args, **kwargs)
        refused.extend([*outcome.missing_keys, *outcome.unexpected_keys])
        return outcome

    chunk.load_state_dict = recorded
