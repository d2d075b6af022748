"""Checkpoints that real megatron-core saves, in processes of their own: torch_dist, and Megatron-LM's legacy format.

Beside the weights is what a training run also saves: optimizer, random states, rerun state. Source of the names and of
which rank writes: Megatron-LM `training/checkpointing.py`.
"""

import multiprocessing
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ckptkit.converters.megatron.parallel import ParallelSizes
from support.calls import call
from support.processes import fork_ranks

ITERATION = 10


@dataclass(frozen=True)
class Save:
    """A checkpoint for Megatron to load from `source` and save into `target`, as a training run of these sizes would.

    `stacked` makes the model homogeneous, so that Megatron stacks all layers of a key; `singleton` asks for a key for
    each expert; `release` saves into `release/`; `legacy` saves one file a rank. `optimizer`: the format in which
    megatron-core's own distributed optimizer saves its state, in buckets of `bucket_size` elements where that is given;
    without it a first moment of zeros stands for that. `hybrid`: as a HybridModel, which `source` then holds.
    `prefix`: of every key of the model, as a wrapper adds it. `fsdp2`: as a run with torch's FSDP2 saves `torch_dcp`.
    """

    config: Mapping[str, Any]
    source: Path
    target: Path
    sizes: ParallelSizes
    stacked: bool = False
    singleton: bool = False
    release: bool = False
    legacy: bool = False
    optimizer: str | None = None
    bucket_size: int | None = None
    hybrid: bool = False
    prefix: str = ""
    fsdp2: bool = False


# What the tests read: by label the name of a release, and how it is saved.
SAVES = {
    label: (how.pop("model"), how | {"sizes": ParallelSizes(**how["sizes"])})
    for label, how in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
}


def save_with_megatron(saves, world):
    """Does all of them, on `world` ranks: those beyond the sizes of a save are data parallel."""
    call("megatron", _ranks, list(saves), world)


# What follows runs in a process of its own, which becomes that of all the ranks.


def _ranks(saves, world):
    with TemporaryDirectory() as folder:
        assert fork_ranks(world, partial(_rank, saves, folder, world))


def _rank(saves, folder, world, rank):
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from ckptkit.verify.witnesses.megatron.model import lay_out, pretend_cuda

    pretend_cuda()
    # Megatron starts the process that has this queue anew, which imports everything again: six seconds a rank.
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    for index, save in enumerate(saves):
        # Groups of its own for each save: those of sizes that are done would keep their threads, which slow all down.
        # The limit ends ranks whose parent was killed.
        store = f"file://{folder}/store-{index}"
        torch.distributed.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(minutes=5)
        )
        lay_out(save.sizes)
        _save(save, rank)
        torch.distributed.barrier()
        if rank == 0:
            (save.target / "latest_checkpointed_iteration.txt").write_text(
                "release" if save.release else str(ITERATION)
            )
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _save(save, rank):
    from ckptkit.converters.planner import dims_of
    from ckptkit.verify.witnesses.megatron.model import MegatronBuild, build_chunks
    from ckptkit.verify.witnesses.megatron.process import load_chunks

    dims = dims_of(save.config)
    chunks = build_chunks(dims, MegatronBuild(save.sizes, torch.bfloat16, hybrid=save.hybrid))
    load_chunks(chunks, str(save.source))
    if save.stacked:
        for chunk in chunks:
            chunk.config.moe_layer_freq = 1
    path = save.target / ("release" if save.release else f"iter_{ITERATION:07d}")
    if rank == 0:
        path.mkdir(parents=True)
    torch.distributed.barrier()
    state = {
        "args": _args(save, dims),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "opt_param_scheduler": {"max_lr": 1e-4},
    }
    written = _save_torch_dcp if save.fsdp2 else _save_legacy if save.legacy else _save_torch_dist
    written(save, chunks, state, path)


def _args(save, dims):
    from argparse import Namespace

    from megatron.core.transformer.enums import AttnBackend

    from ckptkit.converters.megatron.arguments import megatron_args

    sizes = save.sizes
    return Namespace(
        **megatron_args(dims, "hybrid" if save.hybrid else "mcore"),
        params_dtype=torch.bfloat16,
        attention_backend=AttnBackend.auto,
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        decoder_first_pipeline_num_layers=sizes.first,
        decoder_last_pipeline_num_layers=sizes.last,
        pipeline_model_parallel_layout=sizes.layout,
        account_for_embedding_in_pipeline_split=sizes.embedding,
        account_for_loss_in_pipeline_split=sizes.loss,
    )


def _named(chunks):
    return {f"model{index}" if len(chunks) > 1 else "model": chunk for index, chunk in enumerate(chunks)}


def _save_torch_dist(save, chunks, state, path):
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    metadata = {"singleton_local_shards": save.singleton}
    if save.optimizer:
        metadata |= {"distrib_optim_sharding_type": save.optimizer, "chained_optim_avoid_prefix": True}
        wrappers = [_wrapped(chunk, save.bucket_size) for chunk in chunks]
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = {
        name: chunk.sharded_state_dict(prefix=save.prefix, metadata={**metadata, "dp_cp_group": group})
        for name, chunk in _named(chunks).items()
    }
    state |= model
    if save.optimizer:
        (ddp,) = wrappers
        optimizer = _optimizer(ddp)
        with _cpu_for_cuda():
            state["optimizer"] = optimizer.sharded_state_dict(
                model["model"], metadata=metadata | {"dp_cp_group": group}
            )
    else:
        state["optimizer"] = _moments(save, model)
    state["rng_state"] = ShardedObject("rng_state", [{"random_rng_state": (3, (1, 2), None)}], (1, world), (0, rank))
    state["rerun_state_machine"] = ShardedObject("rerun_state_machine_state", {"mode": "disabled"}, (world,), (rank,))
    # Data parallel ranks share the writing, as is Megatron-LM's default (`--ckpt-fully-parallel-save`).
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1), group)
    # Megatron would first gather every shard of every rank to see that they fit, which takes a third of the time.
    dist_checkpointing.save(state, str(path), strategy, validate_access_integrity=False, content_metadata=metadata)


def _optimizer(model, distributed=True):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    own = torch.Tensor.type

    def kind(self, *args, **kwargs):
        """The optimizer takes only parameters of `torch.cuda` types."""
        return own(self, *args, **kwargs) if args or kwargs else f"torch.cuda.{own(self).rpartition('.')[2]}"

    torch.Tensor.type = kind
    config = OptimizerConfig(
        optimizer="adam", lr=1e-4, bf16=True, use_distributed_optimizer=distributed, params_dtype=torch.bfloat16
    )
    with _cpu_for_cuda():
        optimizer = get_megatron_optimizer(config, [model])
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in one.optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.0, 0.0
            for parameter in group["params"]:
                parameter.grad = torch.rand_like(parameter) + 1
        one.optimizer.step()
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                # Half of the distance between two numbers of bfloat16 is 2**-9 of the larger one, or more.
                parameter.data.mul_(1 + torch.rand_like(parameter) * 2**-10)
    return optimizer


def _cpu_for_cuda():
    from ckptkit.verify.witnesses.megatron.model import OnCpu

    return OnCpu()


def _wrapped(chunk, bucket_size):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=bucket_size is not None, bucket_size=bucket_size
    )
    return DistributedDataParallel(chunk.config, config, chunk)


def _moments(save, model):
    """A first moment of zeros. Mixture-of-experts models have one optimizer for the experts and one for the rest."""
    prefix = "chained_1.optimizer" if save.config.get("model_type") != "qwen2" else "optimizer"
    moments = {
        f"{name}.{key}": moment
        for name, keys in model.items()
        for key, sharded in keys.items()
        if (moment := _moment(sharded, f"{prefix}.state.exp_avg"))
    }
    return {"state": moments, "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.95)}]}


def _moment(sharded, prefix):
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

    if not isinstance(sharded, (ShardedTensor, ShardedTensorFactory)):
        return None
    return make_sharded_optimizer_tensor(sharded, torch.zeros_like(sharded.data, dtype=torch.float32), prefix)


def _save_torch_dcp(save, chunks, state, path):
    """Megatron's own wrapper and optimizer, and what `generate_state_dict` and `save_checkpoint` do with them."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint import save as dcp_save
    from torch.distributed.device_mesh import DeviceMesh

    own = DeviceMesh.from_group
    DeviceMesh.from_group = staticmethod(lambda group, device, **more: own(group, "cpu", **more))
    (chunk,) = chunks
    chunk.config.transformer_impl = "local"
    model = TorchFullyShardedDataParallel(chunk.config, DistributedDataParallelConfig(), chunk)
    DeviceMesh.from_group = own
    state["optimizer"] = _optimizer(model, distributed=False).state_dict()
    state["model"] = model.state_dict_for_save_checkpoint()
    state["rng_state"] = [{"random_rng_state": (3, (1, 2), None), "torch_rng_state": torch.get_rng_state()}]
    dcp_save(state, storage_writer=FileSystemWriter(path))


def _save_legacy(save, chunks, state, path):
    from megatron.core import parallel_state

    if parallel_state.get_data_parallel_rank() and parallel_state.get_expert_data_parallel_rank():
        return
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}" if save.sizes.pp > 1 else ""
    name += f"_{parallel_state.get_expert_model_parallel_rank():03d}" if save.sizes.ep > 1 else ""
    for chunk in chunks:
        _into_one_buffer(chunk)
    state |= {name: chunk.state_dict_for_save_checkpoint() for name, chunk in _named(chunks).items()}
    moments = {
        index: {"exp_avg": torch.zeros(value.shape)}
        for chunk in chunks
        for index, value in enumerate(chunk.parameters())
    }
    state["optimizer"] = {
        "optimizer": {"state": moments, "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.95)}]},
        "grad_scaler": None,
    }
    state["rng_state"] = [{"torch_rng_state": torch.get_rng_state(), "random_rng_state": (3, (1, 2), None)}]
    (path / name).mkdir()
    torch.save(state, path / name / "model_optim_rng.pt")


def _into_one_buffer(chunk):
    """Makes all bf16 parameters views of one buffer, as Megatron's DistributedDataParallel does."""
    parameters = [parameter for parameter in chunk.parameters() if parameter.dtype == torch.bfloat16]
    buffer = torch.cat([parameter.data.flatten() for parameter in parameters])
    for parameter, part in zip(parameters, buffer.split([parameter.numel() for parameter in parameters]), strict=True):
        parameter.data = part.view_as(parameter)
