"""Loads a checkpoint with Megatron-LM's own `load_checkpoint`, as a trainer does at its start.

That is part of `megatron.training`, which comes with megatron-core since 0.19. It finds the checkpoint by the tracker
in its root, compares the stored arguments with its own, and loads strictly. It patches torch for the whole process, so
only the witness's own processes import it.
"""

from __future__ import annotations

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.megatron.arguments import launch_flags, megatron_args
from ckptkit.converters.planner import HYBRID, MCORE
from ckptkit.verify.witnesses.megatron.imports import importing_megatron
from ckptkit.verify.witnesses.megatron.job import RankJob
from ckptkit.verify.witnesses.megatron.model import OnCpu, pretend_cuda
from ckptkit.verify.witnesses.megatron.recording_loader import WatchedLoad

# Megatron-LM reads these of the GPU that it expects.
_HOPPER = SimpleNamespace(major=9, minor=0, name="cpu", total_memory=0, multi_processor_count=1)
# Strict is `raise_unexpected`: no key that the model asks for may be absent. `raise_all` would also refuse the names
# that only Transformer Engine's layers ask for, which a checkpoint for both has.
_RUN = (
    "--transformer-impl local --ckpt-format torch_dist --dist-ckpt-strictness raise_unexpected --no-load-optim "
    "--no-load-rng --micro-batch-size 1 --seq-length 8 --train-iters 1 --lr 1e-4 --tokenizer-type NullTokenizer "
    "--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion "
    "--use-cpu-initialization --distributed-backend gloo"
)
_DTYPES = {"bfloat16": ["--bf16"], "float16": ["--fp16"]}


def pretend_gpu() -> OnCpu:
    """Patches torch as Megatron-LM needs it without a GPU; the mode is for the calls of its functions."""
    pretend_cuda()
    torch.cuda.get_device_properties = lambda device=None: _HOPPER  # type: ignore[assignment,return-value]
    torch.cuda.get_device_capability = lambda device=None: (_HOPPER.major, _HOPPER.minor)
    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.empty_cache = lambda: None
    return OnCpu()


def import_loader() -> Any:
    """The module `megatron.training.checkpointing`. Raises ImportError where it, or what it imports, is missing."""
    with pretend_gpu(), importing_megatron():
        from megatron.training import arguments, checkpointing  # noqa: F401
    return checkpointing


def arguments_for(dims: ModelDims, job: RankJob) -> Namespace:
    """Megatron-LM's arguments, parsed and validated by itself, of a launch with the flags of this model."""
    from megatron.training.arguments import parse_args, validate_args

    sizes = job.sizes
    os.environ |= {"RANK": str(job.rank), "LOCAL_RANK": str(job.rank), "WORLD_SIZE": str(sizes.world)}
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # it insists on that wherever tensors are cut
    flags = [
        flag for flag in launch_flags(megatron_args(dims, HYBRID if job.hybrid else MCORE)) if not flag.startswith("#")
    ]
    words = [word for flag in flags for word in shlex.split(flag)]
    words += [*_RUN.split(), *_DTYPES.get(job.dtype, ()), "--load", str(job.trainer)]
    words += ["--global-batch-size", str(sizes.world)]
    words += ["--tensor-model-parallel-size", str(sizes.tp), "--pipeline-model-parallel-size", str(sizes.pp)]
    words += ["--expert-model-parallel-size", str(sizes.ep), "--expert-tensor-parallel-size", str(sizes.etp)]
    sys.argv = ["pretrain", *words]
    args: Namespace = parse_args()
    validate_args(args)
    return args


def load_as_trainer(chunks: Sequence[Any], args: Namespace, reader: WatchedLoad) -> list[str]:
    """Loads into this rank's chunks; returns the names on which `load_state_dict` was not strict.

    `reader` notes what is read. Where a strict load fails, Megatron-LM loads again and lets names go. Raises whatever
    Megatron-LM raises, such as AssertionError for stored arguments that are not its own.
    """
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine
    from megatron.training import checkpointing
    from megatron.training.global_vars import set_args

    refused: list[str] = []
    for chunk in chunks:
        _record(chunk, refused)
    set_args(args)
    init_num_microbatches_calculator(args.rank, None, args.global_batch_size, 1, args.data_parallel_size)
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    # Its options are about checkpoints loaded repeatedly and about FP8, and are off by default.
    with mock.patch.object(checkpointing, "TorchDistLoadShardedStrategy", return_value=reader):
        checkpointing.load_checkpoint(chunks, None, None, strict=True)
    return refused


def _record(chunk: Any, refused: list[str]) -> None:
    load = chunk.load_state_dict

    def recorded(*args: Any, **kwargs: Any) -> Any:
        outcome = load(*args, **kwargs)
        refused.extend([*outcome.missing_keys, *outcome.unexpected_keys])
        return outcome

    chunk.load_state_dict = recorded
