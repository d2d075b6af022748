"""Builds the real SGLang model of an HF config in this process and loads it through the model's own `load_weights`.

On a machine without a GPU the model is built on the CPU and loading stops before the quantization methods repack weights,
which needs CUDA kernels; with a GPU they run. Seen with SGLang 0.5.16. Nothing here is imported before SGLang is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Weights = Iterator[tuple[str, Tensor]]


def server_args(model_path: Path, fused_shared: bool) -> Any:
    """The arguments of an SGLang server for this model, with tensor parallel size 1 and without anything that only serving needs.

    `fused_shared`: keep the shared expert as one more routed expert, as `sglang_slots.fuses_shared` says.
    """
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    cuda = torch.cuda.is_available()
    args = ServerArgs(
        model_path=str(model_path),
        device="cuda" if cuda else "cpu",
        skip_tokenizer_init=True,
        trust_remote_code=False,
        attention_backend="triton" if cuda else "torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_cuda_graph=True,
        disable_shared_experts_fusion=not fused_shared,
    )
    set_global_server_args_for_scheduler(args)
    return args


def start_process_groups(scratch: Path) -> None:
    """SGLang's process groups for one rank, met through a file; once a process."""
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    if torch.distributed.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    method = f"file://{scratch.absolute() / 'meeting_point'}"
    init_distributed_environment(world_size=1, rank=0, local_rank=0, backend=backend, distributed_init_method=method)
    initialize_model_parallel(tensor_model_parallel_size=1)


def allow_building_on_cpu() -> None:
    """Answers for a missing GPU where SGLang asks for one to build a model: each matters only to the forward pass, which is not run.

    The rotary embedding would import vLLM's kernels; compressed-tensors and GLM's fusion of shared experts ask for a capability.
    """
    if torch.cuda.is_available():
        return
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from sglang.srt.layers.rotary_embedding import base
    from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM

    base._is_cpu = True
    CompressedTensorsConfig._check_scheme_supported = lambda *_, **__: True
    Glm4MoeForCausalLM.determine_num_fused_shared_experts = _fuse_as_told


def _fuse_as_told(model: Any) -> None:
    from sglang.srt.runtime_context import get_server_args

    model.num_fused_shared_experts = 0 if get_server_args().disable_shared_experts_fusion else model.config.n_shared_experts


def load(
    model_path: Path, scratch: Path, fused_shared: bool, feed: Weights | None, loading: Callable[[torch.nn.Module, Weights, torch.device], None]
) -> torch.nn.Module:
    """The model class that SGLang chooses for `model_path`, built by SGLang's default loader, which leaves loading to `loading`.

    `loading` gets the model, the weights (`feed`, or what SGLang reads from `model_path` itself) and the device.
    """
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader.loader import DefaultModelLoader

    class Loader(DefaultModelLoader):  # type: ignore[misc]
        def _get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Weights:
            return super()._get_all_weights(model_config, model) if feed is None else feed

        def load_weights_and_postprocess(self, model: torch.nn.Module, weights: Weights, target_device: torch.device) -> None:
            loading(model, weights, target_device)

    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    args = server_args(model_path, fused_shared)
    initialize_moe_config(args)
    allow_building_on_cpu()
    start_process_groups(scratch)
    model_config = ModelConfig.from_server_args(args)
    initialize_dp_attention(args, model_config)
    loader = Loader(LoadConfig(load_format="auto"))
    return loader.load_model(model_config=model_config, device_config=DeviceConfig(args.device))  # type: ignore[no-any-return]
