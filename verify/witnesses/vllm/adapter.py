"""vLLM as an `Engine`: builds the real model of an HF config in this process, and loads it by the model's own code.

Without a GPU the model is built on the CPU (`platform`), and loading stops before the quantization methods repack
weights with CUDA kernels. Works with the releases in `VLLM.tested`. vLLM is imported only inside functions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ckptkit.formats.hf.reader import read_json
from ckptkit.quant.formats.part_names import WEIGHT_PACKED, WEIGHT_SCALE
from ckptkit.verify.witnesses.loading.engine import Loading, ModelBuild, Watch
from ckptkit.verify.witnesses.loading.layouts import layout as layouts
from ckptkit.verify.witnesses.loading.layouts.marlin import marlin
from ckptkit.verify.witnesses.loading.names import cache_dtype, is_unused_input_scale, is_unused_order
from ckptkit.verify.witnesses.process.exit_report import ExitReport, Phase
from ckptkit.verify.witnesses.vllm import platform
from ckptkit.verify.witnesses.vllm.facts import QUIET, VLLM
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


def build(wanted: ModelBuild, loading: Loading, phases: ExitReport) -> nn.Module:
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


_BITS = 4
_PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_CACHE = ("q_scale", "k_scale", "v_scale", "prob_scale")  # copied into attributes of attention, and deleted
# Experts' kernels that keep gate and up, or that put up before gate.
_KEPT = ("TRITON", "BATCHED_TRITON", "VLLM_CUTLASS", "BATCHED_VLLM_CUTLASS", "DEEPGEMM", "BATCHED_DEEPGEMM")
_SWAPPED = ("FLASHINFER_CUTLASS",)
_MARLIN = ("MARLIN", "BATCHED_MARLIN")


def layout(module: nn.Module, method: Any) -> layouts.Layout | None:
    """The layout that vLLM's method and kernel for this module give its parameters, or None if they do not change."""
    if type(method).__name__ in _PLAIN:
        return None
    scheme: Any = getattr(module, "scheme", None)
    if (kernel := getattr(scheme, "kernel", None)) is not None:
        return _packed_layout(module, kernel)
    if hasattr(scheme or method, "fp8_linear"):
        return _fp8_layout(module, scheme or method)
    if any(name in _CACHE for name, _ in module.named_parameters(recurse=False)):
        return layouts.not_kept(_CACHE)
    return _experts_layout(module, method)


def _run(module: Any, inputs: Tensor) -> Any:
    return module.quant_method.apply(module, inputs, bias=None)


def _packed_layout(module: nn.Module, kernel: Any) -> layouts.Layout:
    """INT4 of a Linear layer: Marlin's layout is known, every other kernel is run."""
    config, name = kernel.config, type(kernel).__name__
    ordered = getattr(config, "has_g_idx", False)  # 0.33 refuses such checkpoints
    if ordered or config.weight_type.size_bits != _BITS or config.act_type.itemsize == 1:
        return layouts.unknown_layout(name)
    is_marlin = name == "MarlinLinearKernel"
    return marlin(bias=True) if is_marlin else layouts.products(partial(_run, module), config.act_type)


def _block(module: nn.Module) -> tuple[int, int] | None:
    sizes: Any = getattr(module, "weight_block_size", None)
    return (int(sizes[0]), int(sizes[1])) if sizes else None


def _fp8_layout(module: nn.Module, method: Any) -> layouts.Layout:
    """FP8 of a Linear layer in blocks: unchanged except for its scales, or compared by Marlin's kernel."""
    block, kernel = _block(module), type(method.fp8_linear).__name__
    if block is None:
        return layouts.unknown_layout(kernel)
    if kernel.startswith(("Marlin", "Humming")):
        return layouts.products(partial(_run, module), module.orig_dtype, block)  # type: ignore[arg-type]
    return layouts.fp8_blocks(block, _pairs(module))


def _pairs(module: nn.Module) -> list[tuple[str, str]]:
    own = [name for name, _ in module.named_parameters(recurse=False)]
    return [(name, scale) for name in own for scale in (f"{name}_scale_inv", f"{name}_scale") if scale in own]


def _experts_layout(module: nn.Module, method: Any) -> layouts.Layout | None:
    if getattr(method, "num_bits", _BITS) != _BITS or getattr(method, "actorder", None) == "group":
        return layouts.unknown_layout(type(method).__name__)
    backends = (getattr(method, f"{kind}_backend", None) for kind in ("wna16", "fp8", "unquantized"))
    value: str = next((one.value for one in backends if one is not None), type(method).__name__)
    backend = value.replace(" ", "_").upper()
    block, pairs = _block(module), _pairs(module)
    if hasattr(method, "wna16_backend"):
        # 0.33 has no such attribute, and its layout was not compared.
        is_marlin = backend in _MARLIN and getattr(method, "marlin_input_dtype", method) is None
        return marlin(bias=True) if is_marlin else layouts.unknown_layout(f"{backend} of experts")
    if type(method).__name__ == "CompressedTensorsWNA16MoEMethod":
        return layouts.reordered(_TRITON)
    if hasattr(method, "fp8_backend") and block and backend in _KEPT:
        return layouts.fp8_blocks(block, pairs)
    if hasattr(method, "unquantized_backend") and backend in _KEPT:
        return None
    if backend in _SWAPPED and (block or not pairs):
        own = [name for name, _ in module.named_parameters(recurse=False) if name.startswith("w13_weight")]
        return layouts.reordered(dict.fromkeys(own, layouts.swapped_halves))
    return layouts.unknown_layout(f"{backend} of experts")


_TRITON_PARTS = {  # [experts, words or groups, columns] -> [experts, columns, 4 x words in bytes, or groups]
    WEIGHT_PACKED: lambda tensor: tensor.transpose(1, 2).contiguous().view(torch.uint8),
    WEIGHT_SCALE: lambda tensor: tensor.transpose(1, 2).contiguous(),
}
_TRITON: Mapping[str, Any] = {
    f"{matrix}_{part}": order for matrix in ("w13", "w2") for part, order in _TRITON_PARTS.items()
}


def attention_layout(module: Any) -> layouts.Layout | None:
    """Latent attention computes matrices from `kv_b_proj`, which is also kept; other attention computes none."""
    if not hasattr(module, "kv_b_proj"):
        return None
    return layouts.absorbed(module.kv_b_proj, module.num_heads, module.qk_nope_head_dim, _block(module.kv_b_proj))
