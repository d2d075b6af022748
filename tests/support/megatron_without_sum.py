"""Ranks of the Megatron witness, one of whose layers is wrong in parallel alone: `python -m ... FOLDER RANK...`.

The output projection of the attention of layer 4 leaves out the sum over tensor parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention

from verify.witnesses.megatron import process as witness_megatron


def _without_sum(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
    weight, (given, *_) = module.weight, inputs
    return torch.nn.functional.linear(given, weight), output[1]


def _plant(chunks: list[Any]) -> list[Any]:
    attention = chunks[0].decoder.layers[4].self_attention
    assert isinstance(attention, SelfAttention)
    attention.linear_proj.register_forward_hook(_without_sum)
    return chunks


if __name__ == "__main__":
    build = witness_megatron.build_chunks
    witness_megatron.build_chunks = lambda *args: _plant(build(*args))
    witness_megatron.main()
