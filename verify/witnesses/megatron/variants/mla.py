"""Latent attention (MLA): Megatron's own MLASelfAttention, made to run with Megatron's own core attention too.

Megatron's local spec of latent attention has a DotProductAttention that takes no head sizes and expects values as wide
as queries. Only Transformer Engine's takes other sizes.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from converters.config.dims import ModelDims
from verify.witnesses.megatron.variants.variant import Variant


class LatentDotProductAttention(DotProductAttention):  # type: ignore[misc]
    """Megatron's core attention, for values of another size than queries and keys. It has no parameters."""

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Megatron's base class first builds one without sizes and throws it away. They only shape the output, since the
        # softmax scale is given.
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def _adapt(
    dims: ModelDims, config: TransformerConfig, spec: TransformerBlockSubmodules, transformer_engine: bool
) -> None:
    if dims.mla is None or transformer_engine:
        return
    if not isinstance(multi_latent_attention.TELinear, type):
        # Without Transformer Engine its classes are mocks, and the module asks what is an instance of one.
        multi_latent_attention.HAVE_TE = False
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        if attention.core_attention is DotProductAttention:
            attention.core_attention = LatentDotProductAttention


MLA = Variant(adapt=_adapt)
