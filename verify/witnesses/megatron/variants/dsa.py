"""DeepSeek sparse attention on any machine: Megatron's DSAttention and DSAIndexer without Transformer Engine.

The Hadamard transform of the indexer's queries and keys, a CUDA kernel, is computed by its formula. The rest is
Megatron's, except the order of a head's dimensions before megatron-core 0.19 (`RotaryFirstIndexer`).
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import experimental_attention_variant_module_specs as megatron_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from converters.config.dims import ModelDims
from verify.witnesses.megatron.variants.variant import Variant

# From megatron-core 0.19 on, the indexer rotates the first dimensions of a head, as the releases do.
ROTARY_FIRST = "dsa_indexer_rope_interleaved" in inspect.signature(TransformerConfig).parameters


class WholeLinear(torch.nn.Linear):
    """A linear layer that every tensor parallel rank holds whole, called as Megatron calls Transformer Engine's."""

    def __init__(self, size_in: int, size_out: int, *, config: TransformerConfig, **ignored: Any) -> None:
        super().__init__(size_in, size_out, bias=False, dtype=config.params_dtype)

    def forward(self, tensor: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """The product, and no bias."""
        return super().forward(tensor), None


class LocalBackend(LocalSpecProvider):  # type: ignore[misc]
    """Megatron's local modules, with the linear layer that they lack."""

    def linear(self) -> type:
        """What stands for Transformer Engine's linear layer."""
        return WholeLinear


class RotaryFirstIndexer(dsa.DSAIndexer):  # type: ignore[misc]
    """Megatron's indexer before 0.19, rotating the dimensions that the release means. For tests of the mapping.

    The unchanged one cannot compute the release (docs/mappings.md), so `verify` does not build it.
    """

    def __init__(self, *args: Any, interleaved: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._interleaved = interleaved

    def _apply_rope(self, x: Tensor, rotary_pos_emb: Tensor, mscale: float, **ignored: Any) -> Tensor:
        turned, rest = x[..., : self.qk_pos_emb_head_dim], x[..., self.qk_pos_emb_head_dim :]
        # The order of the last three arguments is (halves or pairs within, pairs first, scale).
        turned = rope_utils._apply_rotary_pos_emb_bshd(turned, rotary_pos_emb, False, self._interleaved, mscale)
        return torch.cat([turned, rest], dim=-1)


def hadamard(tensor: Tensor) -> Tensor:
    """The normalized Walsh-Hadamard transform of the last axis (a power of two), as `rotate_activation` computes it."""
    size, step = tensor.shape[-1], 1
    result = tensor
    while step < size:
        first, second = result.reshape(*tensor.shape[:-1], -1, 2, step).unbind(-2)
        result = torch.stack([first + second, first - second], dim=-2)
        step *= 2
    return result.reshape(tensor.shape) / math.sqrt(size)


def _adapt(
    dims: ModelDims, config: TransformerConfig, spec: TransformerBlockSubmodules, transformer_engine: bool
) -> None:
    if dims.indexer is None:
        return
    if transformer_engine:
        attention = megatron_specs.get_experimental_attention_variant_module_spec(config)
    else:
        dsa.rotate_activation = hadamard
        attention = _local(dims, config, spec.layer_specs[0].submodules.self_attention)
    for layer in spec.layer_specs:
        layer.submodules.self_attention = attention


def _local(dims: ModelDims, config: TransformerConfig, standard: ModuleSpec) -> ModuleSpec:
    """Megatron's spec of sparse attention with local modules; where that does not build, its core in the standard spec.

    Before 0.19 its latent attention needs norms that are fused into linear layers; since then it wants, with tensor
    parallelism, the sequence parallelism that local norms do not know. Parameters have the same names in both.
    """
    sparse = megatron_specs.get_dsa_module_spec_for_backend(config, LocalBackend())
    core = sparse.submodules.core_attention
    if not ROTARY_FIRST:
        core.submodules.indexer.module = RotaryFirstIndexer
        core.submodules.indexer.params = {"interleaved": dims.indexer is not None and dims.indexer.rope_interleaved}
    if not ROTARY_FIRST or config.tensor_model_parallel_size > 1:
        return replace(standard, submodules=replace(standard.submodules, core_attention=core))
    sparse.submodules.linear_q_down_proj = sparse.submodules.linear_kv_down_proj = ColumnParallelLinear
    return sparse


DSA = Variant(adapt=_adapt)
