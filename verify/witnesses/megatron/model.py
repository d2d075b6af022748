"""Builds the real megatron-core GPTModel or HybridModel of a checkpoint, as one rank of a parallel layout holds it.

Works with megatron-core 0.16 and 0.19, on a GPU (NCCL) and without one (gloo). It patches torch, so only the
witness's own processes import it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.megatron.argument_table import BY_NAME
from ckptkit.converters.megatron.argument_values import ones
from ckptkit.converters.megatron.arguments import megatron_args
from ckptkit.converters.megatron.hybrid_model import hybrid_dims, hybrid_pattern, with_stages
from ckptkit.converters.megatron.parallel import ParallelSizes, padded_vocab
from ckptkit.converters.planner import HYBRID, MCORE
from ckptkit.verify.witnesses.megatron.imports import importing_megatron

with importing_megatron():
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.fusions import fused_softmax
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from ckptkit.verify.witnesses.megatron.variants import VARIANTS
    from ckptkit.verify.witnesses.megatron.variants.hybrid_stack import ENGINE_STACK, hybrid_model, local_stack
    from ckptkit.verify.witnesses.megatron.variants.variant import BlockSpec

Chunk = Any  # a GPTModel or a HybridModel: their common base class lacks the attributes used here
_OFF = (
    *("perform_initialization", "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"),
    *("apply_rope_fusion", "gradient_accumulation_fusion"),
)


@dataclass(frozen=True)
class MegatronBuild:
    """Parallel sizes, dtype of parameters, and layer spec (Transformer Engine's or Megatron's own) of a model."""

    sizes: ParallelSizes
    dtype: torch.dtype
    transformer_engine: bool = False
    hybrid: bool = False  # a HybridModel; pipeline sizes count its layers


class OnCpu(TorchFunctionMode):
    """Puts tensors that are made on, or moved to, a CUDA device on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cpu, kwargs = torch.device("cpu"), dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = cpu
        if function is torch.Tensor.to:
            is_cuda = [isinstance(one, (str, torch.device)) and str(one).startswith("cuda") for one in args]
            args = tuple(cpu if moves else one for moves, one in zip(is_cuda, args, strict=True))
        return function(*args, **kwargs)


def pretend_cuda() -> None:
    """Lets megatron-core build and run on a machine without CUDA, with the CPU as the current GPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    # megatron-core 0.16 leaves this name undefined where Transformer Engine is missing, and then reads it.
    vars(moe_utils).setdefault("te_general_gemm", None)
    # Megatron compiles small functions; on the CPU that needs a C++ compiler, and more time than it saves.
    torch._dynamo.config.disable = True
    mask = fused_softmax.get_sliding_window_causal_mask

    def mask_on_cpu(*args: Any) -> Any:
        with OnCpu():
            return mask(*args)

    fused_softmax.get_sliding_window_causal_mask = mask_on_cpu


def connect(sizes: ParallelSizes, rank: int, store: str) -> None:
    """Joins the process group through the file `store` (no port to collide on) and creates the parallel groups."""
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(rank)
    else:
        pretend_cuda()
    backend = "nccl" if has_gpu else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=sizes.world)
    lay_out(sizes)
    if has_gpu:
        tensor_parallel.model_parallel_cuda_manual_seed(0)


def lay_out(sizes: ParallelSizes, *, gloo: bool = True) -> None:
    """Divides all ranks into parallel groups of these sizes; with `gloo` Megatron adds gloo groups."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
        expert_model_parallel_size=sizes.ep,
        context_parallel_size=sizes.cp,
        expert_tensor_parallel_size=sizes.etp,
        create_gloo_process_groups=gloo,
    )


def transformer_config(dims: ModelDims, args: Mapping[str, Any], build: MegatronBuild) -> TransformerConfig:
    """TransformerConfig from Megatron-LM arguments, as Megatron-LM makes it, without randomness or GPU features."""
    kind = MLATransformerConfig if dims.mla else TransformerConfig
    known = {field.name for field in fields(kind)}
    values = {BY_NAME[name].config or name: value for name, value in args.items()}
    fixed: dict[str, Any] = {
        "activation_func": torch.nn.functional.silu,
        "params_dtype": build.dtype,
        "pipeline_dtype": build.dtype,
        "bf16": build.dtype == torch.bfloat16,
        "fp16": build.dtype == torch.float16,
        "tensor_model_parallel_size": build.sizes.tp,
        "pipeline_model_parallel_size": build.sizes.pp,
        "virtual_pipeline_model_parallel_size": build.sizes.vpp if build.sizes.vpp > 1 else None,
        "num_layers_in_first_pipeline_stage": build.sizes.first,
        "num_layers_in_last_pipeline_stage": build.sizes.last,
        "account_for_embedding_in_pipeline_split": build.sizes.embedding,
        "account_for_loss_in_pipeline_split": build.sizes.loss,
        "pipeline_model_parallel_layout": build.sizes.layout,
        # Megatron's own attention, used by the local spec, refuses to compute with context parallelism.
        "context_parallel_size": build.sizes.cp if build.transformer_engine else 1,
        "expert_model_parallel_size": build.sizes.ep,
        "expert_tensor_parallel_size": build.sizes.etp,
        "use_cpu_initialization": not torch.cuda.is_available(),
        **dict.fromkeys(_OFF, False),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
    }
    if build.hybrid:
        fixed |= {"is_hybrid_model": True}
        if dims.indexer:  # as Megatron-LM does for the letter of these layers
            fixed |= {"experimental_attention_variant": "dsa"}
        if build.sizes.vpp > 1:  # the layer pattern has the ends of stages
            fixed |= {"num_layers_in_first_pipeline_stage": None, "num_layers_in_last_pipeline_stage": None}
    values = {key: value for key, value in (values | fixed).items() if key in known}
    for variant in VARIANTS:
        values |= variant.settings(dims)
    return kind(**values)


def build_chunks(dims: ModelDims, build: MegatronBuild) -> list[Chunk]:
    """This rank's model, one GPTModel or HybridModel a virtual pipeline stage, cast to the dtype as in training."""
    args = megatron_args(dims, HYBRID if build.hybrid else MCORE)
    args |= {"moe_grouped_gemm": build.transformer_engine and bool(dims.experts)}
    config = transformer_config(dims, args, build)
    vpp = build.sizes.vpp
    chunks = [_build(dims, args, config, build, stage if vpp > 1 else None) for stage in range(vpp)]
    for chunk in chunks:
        _refuse_two_output_layers(chunk)
        if build.dtype in (torch.bfloat16, torch.float16):
            Float16Module(config, chunk)
        else:
            chunk.to(build.dtype)
        for variant in VARIANTS:
            variant.finish(dims, chunk)
        chunk.eval()
    return chunks


def has_mtp(chunk: Chunk) -> bool:
    """Whether a chunk has multi-token prediction layers, which MambaModel of megatron-core 0.16 does not know."""
    return bool(getattr(chunk, "mtp_process", False))


def _refuse_two_output_layers(chunk: Chunk) -> None:
    """Raises RuntimeError where Megatron's own sharded_state_dict would stop on an assertion without explanation."""
    # Versions with https://github.com/NVIDIA/Megatron-LM/pull/7577 make no second output layer.
    is_last_stage = has_mtp(chunk) and chunk.post_process and not chunk.pre_process
    if is_last_stage and chunk.share_embeddings_and_output_weights and chunk.output_layer.weight is not None:
        raise RuntimeError(
            "this megatron-core neither saves nor loads tied embeddings with multi-token prediction over several "
            "pipeline stages: use one stage, or leave out --mtp-num-layers"
        )


def _standard_spec(make: Callable[..., Any], config: TransformerConfig, build: MegatronBuild, **options: Any) -> Any:
    """Megatron's standard spec, which from 0.19 on refuses a config with another attention; variants add that."""
    standard = copy.copy(config)
    standard.experimental_attention_variant = None
    return make(standard, build.transformer_engine, normalization="RMSNorm", **options)


def _adapted(
    dims: ModelDims, config: TransformerConfig, build: MegatronBuild, spec: BlockSpec, first: int
) -> BlockSpec:
    """The spec of this rank's layers: Megatron's own, changed by variants. `metainfo` has a layer's number, from 0."""
    spec.layer_specs = [
        replace(layer, metainfo={**layer.metainfo, "layer": first + place})
        for place, layer in enumerate(spec.layer_specs)
    ]
    for variant in VARIANTS:
        variant.adapt(dims, config, spec, build.transformer_engine)
    return spec


def _mtp_spec(
    dims: ModelDims, config: TransformerConfig, build: MegatronBuild, spec: BlockSpec, stage: int | None
) -> Any:
    """The spec of multi-token prediction layers, with the model's last layer inside, or None without such layers."""
    if not dims.mtp_layers:
        return None
    if not spec.layer_specs:  # then Megatron-LM uses that layer of the complete model too (its `gpt_builders.py`)
        layers = _standard_spec(gpt_layer_specs.get_gpt_decoder_layer_specs, config, build)  # since 0.16
        spec = _adapted(dims, config, build, replace(spec, layer_specs=layers[-1:]), dims.layers - 1)
    return get_gpt_mtp_block_spec(config, spec, build.transformer_engine, vp_stage=stage)


def _gpt_model(
    dims: ModelDims, args: Mapping[str, Any], config: TransformerConfig, build: MegatronBuild, stage: int | None
) -> Callable[..., Chunk]:
    spec = _standard_spec(get_gpt_decoder_block_spec, config, build, vp_stage=stage)
    spec = _adapted(dims, config, build, spec, get_transformer_layer_offset(config, vp_stage=stage))
    return partial(
        GPTModel,
        transformer_layer_spec=spec,
        rope_scaling=args.get("use_rope_scaling", False),
        rope_scaling_factor=args.get("rope_scaling_factor", 8.0),
        mtp_block_spec=_mtp_spec(dims, config, build, spec, stage),
        vp_stage=stage,
    )


def _hybrid_model(
    dims: ModelDims, config: TransformerConfig, build: MegatronBuild, stage: int | None
) -> Callable[..., Chunk]:
    """HybridModel with its own arguments and megatron-core's own spec, or one of GPTModel's layers."""
    one_stage = replace(build, sizes=ParallelSizes(build.sizes.tp, 1, build.sizes.ep, build.sizes.etp), hybrid=False)
    args = megatron_args(dims) | {"moe_grouped_gemm": config.moe_grouped_gemm}
    as_gpt = transformer_config(dims, args | ({"moe_layer_freq": ones(dims, dims.moe)} if dims.moe else {}), one_stage)
    spec = _standard_spec(get_gpt_decoder_block_spec, as_gpt, build)
    layers = _standard_spec(gpt_layer_specs.get_gpt_decoder_layer_specs, as_gpt, build)
    spec = _adapted(dims, config, build, replace(spec, layer_specs=layers), 0)
    mtp = get_gpt_mtp_block_spec(as_gpt, spec, build.transformer_engine, vp_stage=stage) if dims.mtp_layers else None
    stack = ENGINE_STACK if build.transformer_engine else local_stack(dims, spec.layer_specs, mtp, build.sizes.tp)
    pattern = hybrid_pattern(dims)
    if build.sizes.vpp > 1:  # only then Megatron requires the ends of stages
        pattern = with_stages(pattern, build.sizes.pipeline(hybrid_dims(dims)))
    return hybrid_model(stack, pattern, stage)


def _build(
    dims: ModelDims, args: Mapping[str, Any], config: TransformerConfig, build: MegatronBuild, stage: int | None
) -> Chunk:
    kind = _hybrid_model(dims, config, build, stage) if build.hybrid else _gpt_model(dims, args, config, build, stage)
    # Megatron's local norms are plain torch modules, made on torch's default device.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return kind(
            config=config,
            vocab_size=padded_vocab(dims.vocab, build.sizes.tp),
            max_sequence_length=args["max_position_embeddings"],
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
            parallel_output=False,
            share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
            position_embedding_type=args["position_embedding_type"],
            rotary_percent=args.get("rotary_percent", 1.0),
            rotary_base=args.get("rotary_base", 10000),
            seq_len_interpolation_factor=args.get("rotary_seq_len_interpolation_factor"),
        )


def logits(model: Chunk, tokens: Tensor) -> Tensor:
    """Logits [batch, sequence, padded vocabulary] of token ids [batch, sequence], on a rank with the output layer."""
    return all_logits(model, tokens)[-1]


def inputs_of(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of token ids [batch, sequence], and the mask that hides later tokens from earlier ones."""
    length = tokens.shape[1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
    return torch.arange(length, device=tokens.device).expand_as(tokens), hidden


def all_logits(model: Chunk, tokens: Tensor) -> list[Tensor]:
    """Logits [batch, sequence, padded vocabulary] of each multi-token prediction layer, and last of the model itself.

    Such a layer predicts the token after the next; it also sees the next token, with 0 after the last.
    """
    recorded: list[Tensor] = []

    def keep(layer: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        # Megatron's cross entropy overwrites its input.
        recorded.append(outputs[0].transpose(0, 1).clone())

    hook = model.output_layer.register_forward_hook(keep)
    try:
        with torch.no_grad():
            # megatron-core 0.16 cannot run multi-token prediction layers without labels, which only the loss uses.
            model(tokens, *inputs_of(tokens), labels=tokens if has_mtp(model) else None)
    finally:
        hook.remove()
    return recorded
