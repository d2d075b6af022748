"""Runs a model that is laid out over ranks, pipeline stage by pipeline stage, and keeps what each part computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from converters.megatron.hybrid_model import PATTERNS, own_layers
from converters.megatron.parallel import ParallelSizes
from verify.witnesses.megatron.imports import importing_megatron
from verify.witnesses.reference import residuals as stages

with importing_megatron():
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.moe import moe_utils

    from verify.witnesses.megatron.model import Chunk, inputs_of, logits


def multiply_plainly() -> None:
    """Has the routers of this process multiply as they do where Transformer Engine is not installed.

    Where it is, they call its `general_gemm`, whatever layers the model has (`RouterGatingLinearFunction`). That rounds
    factors in float32 to TF32, which has 10 bits of mantissa, and it knows no CPU.
    """
    moe_utils.te_general_gemm = None


def forward(chunks: Sequence[Chunk], sizes: ParallelSizes, prompt: Sequence[int]) -> Tensor | None:
    """Logits [tokens, padded vocabulary] of a prompt (token ids) on ranks of the last pipeline stage, else None.

    Every rank must call it. Hidden states [tokens, 1, hidden size] go from one stage to the next by a broadcast among
    the ranks of a pipeline; virtual stage `v` of rank `p` is number `v * pp + p`.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    ranks, here = torch.distributed.get_process_group_ranks(group), parallel_state.get_pipeline_model_parallel_rank()
    like = next(chunks[0].parameters())
    tokens = torch.tensor([prompt], device=like.device)
    hidden = torch.empty(len(prompt), 1, chunks[0].config.hidden_size, dtype=like.dtype, device=like.device)
    last = sizes.pp * sizes.vpp - 1
    for number in range(last):
        virtual, rank = divmod(number, sizes.pp)
        if rank == here:
            hidden = _hidden(chunks[virtual], hidden if number else None, tokens)
        torch.distributed.broadcast(hidden, ranks[rank], group=group)
    if here != sizes.pp - 1:
        return None
    chunks[-1].set_input_tensor(hidden if last else None)
    return logits(chunks[-1], tokens)[0]


def _hidden(chunk: Chunk, given: Tensor | None, tokens: Tensor) -> Tensor:
    chunk.set_input_tensor(given)
    with torch.no_grad():
        hidden: Tensor = chunk(tokens, *inputs_of(tokens))
    return hidden.contiguous()


def recorded(chunks: Sequence[Chunk], run: Callable[[], Tensor | None]) -> tuple[Tensor | None, dict[str, Tensor]]:
    """What `run` gives, and what this rank computes meanwhile: by stage, [tokens, hidden size or vocabulary]."""
    found: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for chunk in chunks:
            for hook in _hooks(chunk, partial(_keep, found)):
                stack.callback(hook.remove)
        logits = run()
    return logits, found | ({} if logits is None else {stages.OUTPUT: logits})


def _keep(found: dict[str, Tensor], stage: str, hidden: Tensor) -> None:
    found[stage] = hidden[:, 0].clone()


def _has_layers_of_one_block(chunk: Chunk) -> bool:
    """Whether the layers of a HybridModel are the model's own, and no halves of a GPTModel's."""
    return own_layers({name: getattr(chunk, name, None) for name in PATTERNS}) is not None


def _hooks(chunk: Chunk, keep: Callable[[str, Tensor], None]) -> list[Any]:
    hooks = []
    hybrid, single = not isinstance(chunk, GPTModel), _has_layers_of_one_block(chunk)
    for layer in chunk.decoder.layers:
        number = int(layer.layer_number) - 1
        if number == 0:
            hooks.append(layer.register_forward_pre_hook(_on_input(keep, stages.EMBEDDING), with_kwargs=True))
        if hybrid:
            stage = stages.mlp(number) if single else (stages.attention, stages.mlp)[number % 2](number // 2)
            hooks.append(layer.register_forward_hook(_on_output(keep, stage)))
            continue
        # Also where the norm is part of the next linear layer: then this module gives back what it is given.
        hooks.append(
            layer.pre_mlp_layernorm.register_forward_pre_hook(
                _on_input(keep, stages.attention(number)), with_kwargs=True
            )
        )
        hooks.append(layer.register_forward_hook(_on_output(keep, stages.mlp(number))))
    if chunk.post_process:
        # Multi-token prediction layers use the output layer too, before the model itself does.
        hooks.append(chunk.output_layer.register_forward_pre_hook(_on_input(keep, stages.FINAL_NORM), with_kwargs=True))
    return hooks


def _on_input(keep: Callable[[str, Tensor], None], stage: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Sequence[Any], named: dict[str, Any]) -> None:
        keep(stage, args[0] if args else named["hidden_states"])

    return hook


def _on_output(keep: Callable[[str, Tensor], None], stage: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Sequence[Any], output: Any) -> None:
        keep(stage, output if isinstance(output, Tensor) else output[0])  # Mamba layers give hidden states alone

    return hook
