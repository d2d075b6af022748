"""megatron-core's own distributed optimizer on the CPU, after one step, as a training run saves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def _as_if_on_a_gpu() -> None:
    """The optimizer takes only parameters of `torch.cuda` types."""
    own = torch.Tensor.type

    def kind(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(self, *args, **kwargs) if args or kwargs else f"torch.cuda.{own(self).rpartition('.')[2]}"

    torch.Tensor.type = kind  # type: ignore[assignment,method-assign]


def _cpu_for_cuda() -> Any:
    from ckptkit.verify.witnesses.megatron.model import OnCpu

    return OnCpu()


def optimizer_state(ddp: Any, sharded: Mapping[str, Any], metadata: Mapping[str, Any]) -> Any:
    """What `sharded_state_dict` gives of the optimizer of a wrapped chunk, after a step too small to show in bfloat16.

    `sharded` is that of the chunk itself: it must hold the parameters that the optimizer has.
    """
    optimizer = made(ddp)
    _step(optimizer)
    with _cpu_for_cuda():
        return optimizer.sharded_state_dict(sharded, metadata=dict(metadata))


def plain_optimizer_state(model: Any) -> Any:
    """What `state_dict` gives of the optimizer of a model in a wrapper of FSDP2, which is not a distributed one."""
    optimizer = made(model, distributed=False)
    _step(optimizer)
    return optimizer.state_dict()


def _step(optimizer: Any) -> None:
    """One too small to show in bfloat16."""
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


def wrapped(chunk: Any, bucket_size: int | None = None) -> Any:
    """The chunk in Megatron's data parallel wrapper, which moves its parameters into buffers.

    `bucket_size`: elements of one of several buckets, as a run has them whose gradients are reduced while it computes.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=bucket_size is not None, bucket_size=bucket_size
    )
    return DistributedDataParallel(chunk.config, config, chunk)


def made(ddp: Any, distributed: bool = True) -> Any:
    """Megatron's optimizer of a wrapped chunk."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    _as_if_on_a_gpu()
    config = OptimizerConfig(
        optimizer="adam", lr=1e-4, bf16=True, use_distributed_optimizer=distributed, params_dtype=torch.bfloat16
    )
    with _cpu_for_cuda():
        return get_megatron_optimizer(config, [ddp])
