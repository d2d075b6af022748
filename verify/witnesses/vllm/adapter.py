"""vLLM as an `Engine`: builds the real model of an HF config in this process, and loads it by the model's own code.

Without a GPU the model is built on the CPU (`platform`), and loading stops before the quantization methods repack
weights with CUDA kernels. Works with the releases in `VLLM.tested`. vLLM is imported only inside functions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from ckptkit.formats.hf.reader import read_json
from ckptkit.verify.witnesses.loading.engine import Loading, ModelBuild, Watch
from ckptkit.verify.witnesses.loading.names import cache_dtype, is_unused_input_scale, is_unused_order
from ckptkit.verify.witnesses.process.exit_report import Phase, PhaseLog
from ckptkit.verify.witnesses.vllm import platform
from ckptkit.verify.witnesses.vllm.facts import QUIET, VLLM
from ckptkit.verify.witnesses.vllm.layouts import attention_layout, layout
from ckptkit.verify.witnesses.vllm.platform import emulated_device as emulated_device

FACTS = VLLM
# Modules in which vLLM reads its set-up, or searches kernels.
_INFRASTRUCTURE = (
    *("vllm.config", "vllm.envs", "vllm.forward_context", "vllm.platforms", "vllm.plugins", "vllm.v1.attention"),
    *("vllm.distributed.device_communicators", "vllm.distributed.parallel_state"),
)
# Exceptions before a model's constructor are about our set-up.
SET_UP = Phase("setting vLLM up")
# Modules in which vLLM refuses a config, with a message about it.
_VALIDATORS = (
    *("vllm.model_executor.models", "vllm.models"),
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.model_executor.layers.quantization.utils.fp8_utils",
    "vllm.model_executor.layers.quantization.utils.quant_utils",
)
BUILD = Phase("building the model", ("vllm.model_executor", "vllm.models"), _VALIDATORS, _INFRASTRUCTURE)
# vLLM may fail on features of a GPU that the emulated one lacks.
BUILD_WITHOUT_GPU = Phase("building the model without a GPU", config_validators=_VALIDATORS)
LOAD = Phase("loading the weights", ("vllm",), infrastructure=_INFRASTRUCTURE)
REPACK = Phase("repacking the weights", ("vllm.model_executor.layers",), infrastructure=_INFRASTRUCTURE)


def build(wanted: ModelBuild, loading: Loading, phases: PhaseLog) -> nn.Module:
    """Builds the model that vLLM chooses with its default loader, which calls `loading` where it would load."""
    phases.enter(SET_UP)
    os.environ.update(QUIET)
    platform.choose_platform(wanted.scratch)
    from vllm.config import set_current_vllm_config
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import base_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.platforms import current_platform

    config = configure(wanted)

    class Loader(DefaultModelLoader):  # type: ignore[misc]
        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            weights = self.get_all_weights(model_config, model) if wanted.weights is None else wanted.weights()
            loading(model, weights, config.device_config.device)

    model_config = config.speculative_config.draft_model_config if wanted.draft else config.model_config
    phases.enter(BUILD_WITHOUT_GPU if current_platform.device_type == "cpu" else BUILD)
    # `loading` has already run these steps if they can run.
    without_repacking = patch.object(base_loader, "process_weights_after_loading")
    with set_current_vllm_config(config), without_repacking:
        loader = Loader(LoadConfig(load_format="auto", use_tqdm_on_load=False))
        model: nn.Module = loader.load_model(vllm_config=config, model_config=model_config)
    return model


def run_after_loading(model: nn.Module, watch: Watch) -> None:
    """Runs the steps of vLLM's loader: those of each module's quantization method, then those of attention."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.attention import Attention, MLAAttention, MMEncoderAttention
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    modules = dict(model.named_modules())
    kinds = (Attention, MLAAttention, MMEncoderAttention)
    attention = {name: module for name, module in modules.items() if isinstance(module, kinds)}
    # Before its projections are repacked.
    absorbed = {name: attention_layout(module) for name, module in attention.items()}
    for name, module in modules.items():
        method: Any = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            with watch(name, module, layout(module, method)):
                method.process_weights_after_loading(module)
    dtype = get_current_vllm_config().model_config.dtype
    for name, module in attention.items():
        if step := getattr(module, "process_weights_after_loading", None):
            with watch(name, module, absorbed[name]):
                step(dtype)


def share(target: Any, draft: Any) -> None:
    """Gives a loaded draft model the embeddings and the output layer of its target, by functions of vLLM's proposer."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.models.interfaces import supports_multimodal
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    language_model = target.get_language_model() if supports_multimodal(target) else target
    config = get_current_vllm_config()
    proposer: Any = SimpleNamespace(model=draft, vllm_config=config, use_local_argmax_reduction=False)
    SpecDecodeBaseProposer._maybe_share_embeddings(proposer, language_model)
    SpecDecodeBaseProposer._maybe_share_lm_head(proposer, language_model)


def left_empty(param: str, config: Mapping[str, Any]) -> bool:
    """Whether vLLM allocates this parameter though no tensor of the checkpoint belongs in it."""
    return is_unused_input_scale(param, config) or is_unused_order(param, config)


def configure(wanted: ModelBuild) -> Any:
    """Sets vLLM up in this process for one rank. Returns its VllmConfig."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    sizes = wanted.sizes
    args = EngineArgs(
        model=str(wanted.path),
        skip_tokenizer_init=True,
        trust_remote_code=False,
        enforce_eager=True,
        # No weight depends on it; for DeepSeek-V4 vLLM has kernels only for FP8.
        kv_cache_dtype=cache_dtype(read_json(wanted.path / "config.json"), VLLM.name),
        max_model_len=256,  # no weight depends on it
        tensor_parallel_size=sizes.tp,
        pipeline_parallel_size=sizes.pp,
        distributed_executor_backend="mp" if sizes.ranks > 1 else None,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1} if wanted.draft else None,
    )
    # vLLM inspects a model's class in a subprocess, so that the caller need not import it.
    with patch.object(registry, "_run_in_subprocess", lambda function: function()):
        # vLLM refuses expert parallelism without experts.
        args.enable_expert_parallel = sizes.ep > 1 and args.create_model_config().get_num_experts() > 0
        config = args.create_engine_config()
    config.parallel_config.rank = wanted.rank
    start_process_groups(config, wanted)
    return config


def start_process_groups(config: Any, wanted: ModelBuild) -> None:
    """Starts vLLM's process groups, through a file; ends those of an earlier model."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform

    sizes = wanted.sizes
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            parallel_state.init_distributed_environment(
                world_size=sizes.ranks,
                rank=wanted.rank,
                local_rank=wanted.rank,
                backend=current_platform.dist_backend,
                distributed_init_method=f"file://{wanted.scratch.absolute() / 'meeting_point'}",
            )
        parallel_state.initialize_model_parallel(sizes.tp, sizes.pp)
