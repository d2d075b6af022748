"""Runs a model that is laid out over ranks, pipeline stage by pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from converters.megatron.parallel import ParallelSizes
from verify.witnesses.megatron.imports import importing_megatron

with importing_megatron():
    from megatron.core import parallel_state
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
