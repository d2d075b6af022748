"""SGLang as an `Engine`: builds the real model of an HF config in this process, and loads it by the model's own code.

Without a GPU the model is built on the CPU, and loading stops before the quantization methods repack weights with CUDA
kernels. Works with the releases in `SGLANG.tested`. SGLang is imported only inside functions.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import nn

from ckptkit.core.errors import CkptkitError
from ckptkit.formats.hf.reader import read_json
from ckptkit.quant.formats.modelopt import unify_configs
from ckptkit.quant.formats.part_names import FP8_SCALE_INV, WEIGHT_SCALE_INV
from ckptkit.verify.quirks import installed, quirks
from ckptkit.verify.witnesses.loading.engine import Loading, ModelBuild, Watch, Weights
from ckptkit.verify.witnesses.loading.job import ONE_RANK, EngineSizes
from ckptkit.verify.witnesses.loading.layouts.layout import Layout, fp8_blocks, unknown_layout
from ckptkit.verify.witnesses.loading.layouts.marlin import marlin, packed_parameters
from ckptkit.verify.witnesses.loading.names import has_nvfp4, is_unused_input_scale, is_unused_order
from ckptkit.verify.witnesses.process.exit_report import ExitReport, Phase
from ckptkit.verify.witnesses.process.h100 import CAPABILITY
from ckptkit.verify.witnesses.sglang.facts import SGLANG

FACTS = SGLANG
# Modules in which SGLang reads its set-up.
_INFRASTRUCTURE = (
    *("sglang.srt.distributed", "sglang.srt.environ", "sglang.srt.layers.dp_attention", "sglang.srt.layers.moe.utils"),
    *("sglang.srt.models.registry", "sglang.srt.runtime_context", "sglang.srt.server_args"),
)
# Exceptions before a model's constructor are about our set-up, except those about quantization_config.
SET_UP = Phase("setting SGLang up")
BUILD = Phase(
    "building the model",
    ("sglang.srt.models", "sglang.srt.layers.quantization"),
    ("sglang.srt.layers.quantization.compressed_tensors",),  # it raises ImportError for an unknown format
    _INFRASTRUCTURE,
)
LOAD = Phase("loading the weights", ("sglang",), infrastructure=_INFRASTRUCTURE)
REPACK = Phase("repacking the weights", ("sglang.srt.layers",), infrastructure=_INFRASTRUCTURE)
# Of DeepSeek-V4, read while SGLang is imported: `wo_a` in FP8, which its server disables on every GPU before Blackwell,
# and kernels that it compiles after loading.
WITHOUT_GPU = {"SGLANG_OPT_FP8_WO_A_GEMM": "0", "SGLANG_DSV4_MHC_PREWARM": "0"}
_ONE_EACH = "Step3p5MTP"  # needs the number of its layer, which SGLang's workers for several draft models pass
_INDEXER = re.compile(r"model\.layers\.(\d+)\.self_attn\.indexer\..+")
_MARLIN = ("CompressedTensorsWNA16", "CompressedTensorsWNA16MoE")  # schemes with Marlin's kernel


def build(wanted: ModelBuild, loading: Loading, phases: ExitReport) -> nn.Module:
    """Builds the model, with `loading` in place of SGLang's own. Raises CkptkitError without a draft model."""
    phases.enter(SET_UP)
    if not torch.cuda.is_available():
        os.environ.update(WITHOUT_GPU)
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader

    class Loader(DefaultModelLoader):  # type: ignore[misc]
        def _get_all_weights(self, model_config: Any, model: nn.Module) -> Weights:
            return super()._get_all_weights(model_config, model) if wanted.weights is None else wanted.weights()

        def load_weights_and_postprocess(self, model: nn.Module, weights: Weights, target_device: torch.device) -> None:
            loading(model, weights, target_device)

    if torch.cuda.is_available():
        torch.cuda.set_device(wanted.rank)
    args, model_config = configure(wanted.path, wanted.scratch, wanted.fused_shared, wanted.sizes, wanted.rank)
    if wanted.draft:
        model_config = _draft_config(args, model_config)
    loader, device = Loader(LoadConfig(load_format="auto")), DeviceConfig(args.device, wanted.rank)
    phases.enter(BUILD)
    model: nn.Module = loader.load_model(model_config=model_config, device_config=device)
    return model


def run_after_loading(model: nn.Module, watch: Watch) -> None:
    """Runs the step of each module's quantization method, as SGLang's loader does."""
    for name, module in [*model.named_modules()]:
        method: Any = getattr(module, "quant_method", None)
        if method is not None:
            with watch(name, module, layout(module)):
                method.process_weights_after_loading(module)


def layout(module: nn.Module) -> Layout | None:
    """Marlin's for packed INT4, unless columns are in activation order; FP8 blocks unchanged, or in other scales."""
    scheme: Any = getattr(module, "scheme", None)
    if packed_parameters(module):
        is_ordered = getattr(scheme, "has_g_idx", False) or getattr(scheme, "actorder", None) == "group"
        is_marlin = type(scheme).__name__ in _MARLIN and not is_ordered
        return marlin(awq_experts=True) if is_marlin else unknown_layout(type(scheme).__name__)
    scales = [name for name, _ in module.named_parameters(recurse=False) if name.endswith(WEIGHT_SCALE_INV)]
    if not scales:
        return None
    method: Any = getattr(module, "quant_method", None)
    block = getattr(getattr(method, "quant_config", None), "weight_block_size", None)
    pairs = [(name.removesuffix(FP8_SCALE_INV), name) for name in scales]
    return fp8_blocks((block[0], block[1]), pairs) if block else unknown_layout(type(method).__name__)


def left_empty(param: str, config: Mapping[str, Any]) -> bool:
    """Whether SGLang allocates this parameter for no tensor, such as the indexer of a layer that shares one."""
    if is_unused_input_scale(param, config):
        # Kernels of experts that SGLang chooses on Blackwell quantize inputs in any case (0.5.16, but for Marlin).
        is_blackwell = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)
        return not (is_blackwell and param.rpartition(".")[2].startswith("w"))
    allocated = quirks("sglang", "unwritten_ok", installed("sglang"))
    if is_unused_order(param, config) or any(one.is_about(param, config) for one in allocated):
        return True
    if (indexer := _INDEXER.fullmatch(param)) is None:
        return False
    from sglang.srt.configs.model_config import dsa_layer_skips_topk, is_deepseek_dsa

    fields = SimpleNamespace(**config)
    return is_deepseek_dsa(fields) and bool(dsa_layer_skips_topk(fields, int(indexer[1])))


def emulated_device() -> None:
    """SGLang chooses for the device of the model."""


def share(target: Any, draft: Any) -> None:
    """Gives a draft model its target's embeddings and output layer. Source: `init_lm_head` of `eagle_worker_v2.py`."""
    # Some classes then wait for a GPU.
    with nullcontext() if torch.cuda.is_available() else patch.object(torch.cuda, "synchronize"):
        draft.set_embed_and_head(*target.get_embed_and_head())
    if hasattr(draft, "set_lm_head_from_target") and hasattr(target, "lm_head"):
        draft.set_lm_head_from_target(target.lm_head)


def server_options(sizes: EngineSizes) -> dict[str, Any]:
    """Options of an SGLang server with these sizes, which computes every prompt anew and without CUDA graphs."""
    return {
        "tp_size": sizes.tp,
        "ep_size": sizes.ep,
        "dp_size": sizes.tp if sizes.dp_attention else 1,
        "enable_dp_attention": sizes.dp_attention,
        "skip_tokenizer_init": True,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        # The radix cache of linear attention needs a GPU.
        **dict.fromkeys(("disable_cuda_graph", "disable_overlap_schedule", "disable_radix_cache"), True),
    }


def publish(model_path: Path, fused_shared: bool, sizes: EngineSizes = ONE_RANK, rank: int = 0) -> Any:
    """Makes the arguments of an SGLang server for this model those of this process, and returns them."""
    from sglang.srt import runtime_context, server_args

    config, cuda = read_json(model_path / "config.json"), torch.cuda.is_available()
    if not cuda:  # an H100's, by which SGLang chooses kernels for sparse attention
        torch.cuda.get_device_capability = lambda *_: CAPABILITY
    args = server_args.ServerArgs(
        model_path=str(model_path),
        device="cuda" if cuda else "cpu",
        **server_options(sizes),
        trust_remote_code=False,
        # On a CPU never called. gpt-oss requires triton; Nemotron-H without attention in its first layer refuses it.
        attention_backend="torch_native" if config.get("model_type") == "nemotron_h" else "triton",
        disable_shared_experts_fusion=not fused_shared,
        # Without a GPU the class for experts in NVFP4 is built only for Marlin's kernels.
        moe_runner_backend="marlin" if not cuda and has_nvfp4(unify_configs(config, model_path)) else "auto",
    )
    if hasattr(runtime_context, "SpawnRanks"):  # since then the rank of the process is published with the arguments
        ranks = runtime_context.SpawnRanks(world_rank=rank, gpu_id=rank if cuda else None)
        runtime_context.publish(args, role="scheduler", ranks=ranks)
    else:
        server_args.set_global_server_args_for_scheduler(args)
    return args


def configure(
    model_path: Path, scratch: Path, fused_shared: bool, sizes: EngineSizes = ONE_RANK, rank: int = 0
) -> tuple[Any, Any]:
    """Sets SGLang up in this process for one rank. Returns its server arguments and its ModelConfig."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.moe import initialize_moe_config

    args = publish(model_path, fused_shared, sizes, rank)
    _call(initialize_moe_config, server_args=args)
    allow_building_on_cpu()
    start_process_groups(scratch, sizes, rank)
    model_config = ModelConfig.from_server_args(args)
    for name in ("initialize_dp_attention", "init_dp_gathered_buffer"):  # one function up to 0.5.16, two in 0.5.23
        if hasattr(dp_attention, name):
            _call(getattr(dp_attention, name), server_args=args, model_config=model_config)
    return args, model_config


def _draft_config(args: Any, target: Any) -> Any:
    from sglang.srt.configs.model_config import ModelConfig

    (own,) = target.hf_config.architectures
    model_config = ModelConfig.from_server_args(args, model_path=args.model_path, is_draft_model=True)
    if model_config.hf_config.architectures == [own]:
        raise CkptkitError(f"SGLang has no class for the draft layers of {own}", "serve without speculative decoding")
    if model_config.hf_config.architectures == [_ONE_EACH]:
        raise CkptkitError(f"ckptkit cannot check {_ONE_EACH}, SGLang's class for multi-token prediction layers")
    return model_config


def draft_class(model_path: Path) -> str | None:
    """The class into which SGLang loads the multi-token prediction layers, or None without one for this model."""
    from sglang.srt.configs.model_config import ModelConfig

    (own,), (draft,) = (
        ModelConfig(str(model_path), trust_remote_code=False, is_draft_model=draft).hf_config.architectures
        for draft in (False, True)
    )
    return None if draft == own else str(draft)


def _call(function: Callable[..., Any], **offered: Any) -> Any:
    """Calls with those arguments that the function's signature has, which changes with SGLang's releases."""
    parameters = inspect.signature(function).parameters
    return function(**{name: value for name, value in offered.items() if name in parameters})


def start_process_groups(scratch: Path, sizes: EngineSizes = ONE_RANK, rank: int = 0) -> None:
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    if torch.distributed.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    method = f"file://{scratch.absolute() / 'meeting_point'}"
    init_distributed_environment(
        world_size=sizes.tp, rank=rank, local_rank=rank, backend=backend, distributed_init_method=method
    )
    _call(  # 0.5.23 reads the sizes from the published arguments
        initialize_model_parallel,
        tensor_model_parallel_size=sizes.tp,
        expert_model_parallel_size=sizes.ep,
        attention_data_parallel_size=sizes.tp if sizes.dp_attention else 1,
    )


def allow_building_on_cpu() -> None:
    """Lets SGLang build a model without a GPU, which only the forward pass needs."""
    if torch.cuda.is_available():
        return
    # The rotary embedding would import vLLM's kernels, and its CPU variant supports few models; compressed-tensors and
    # GLM's fusion of shared experts read a compute capability, Qwen3-Next the GPU's number; experts in NVFP4 allocate
    # their swizzled scales on the GPU. DeepSeek-V4's draft model empties its cache, and Kimi K3 creates streams.
    torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from sglang.srt.layers.rotary_embedding import base, factory
    from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM

    os.environ["SGLANG_NCCL_SO_PATH"] = "none"  # else several ranks would start NCCL
    torch.cuda.Stream = Mock  # type: ignore[assignment,misc]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    base._is_cpu = True
    for_cpu = factory.get_rope_cpu  # has only one kind, which get_rope builds only on a GPU
    factory.get_rope_cpu = lambda *args: for_cpu(*args) if args[5] else factory.get_rope(*args[:8])
    CompressedTensorsConfig._check_scheme_supported = lambda *_, **__: True
    # Up to 0.5.16 the model decides, in 0.5.23 its class.
    if hasattr(Glm4MoeForCausalLM, "determine_num_fused_shared_experts"):
        Glm4MoeForCausalLM.determine_num_fused_shared_experts = _fuse_as_told
    else:
        Glm4MoeForCausalLM.shared_experts_fusion_disable_reason = classmethod(lambda *_: None)


def _fuse_as_told(model: Any) -> None:
    from sglang.srt.runtime_context import get_server_args

    is_fused = not get_server_args().disable_shared_experts_fusion
    model.num_fused_shared_experts = model.config.n_shared_experts if is_fused else 0
