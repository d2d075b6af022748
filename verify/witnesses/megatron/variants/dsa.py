"""DeepSeek sparse attention on any machine: Megatron's DSAttention and DSAIndexer without Transformer Engine."""

from __future__ import annotations

import inspect
from dataclasses import replace

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as megatron_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from converters.config.dims import ModelDims
from verify.witnesses.megatron.variants.variant import Variant, WholeLinear

# From megatron-core 0.19 on, the indexer rotates the first dimensions of a head, as the releases do.
ROTARY_FIRST = "dsa_indexer_rope_interleaved" in inspect.signature(TransformerConfig).parameters


class LocalBackend(LocalSpecProvider):  # type: ignore[misc]
    """Megatron's local modules, with the linear layer that they lack."""

    def linear(self) -> type:
        """What stands for Transformer Engine's linear layer."""
        return WholeLinear


def _adapt(
    dims: ModelDims, config: TransformerConfig, spec: TransformerBlockSubmodules, transformer_engine: bool
) -> None:
    if dims.indexer is None:
        return
    if transformer_engine:
        attention = megatron_specs.get_experimental_attention_variant_module_spec(config)
    else:
        attention = _local(config, spec.layer_specs[0].submodules.self_attention)
    for layer in spec.layer_specs:
        layer.submodules.self_attention = attention


def _local(config: TransformerConfig, standard: ModuleSpec) -> ModuleSpec:
    """Megatron's spec of sparse attention with local modules; where that does not build, its core in the standard spec.

    Before 0.19 its latent attention needs norms that are fused into linear layers; since then it wants, with tensor
    parallelism, the sequence parallelism that local norms do not know. Parameters have the same names in both.
    """
    sparse = megatron_specs.get_dsa_module_spec_for_backend(config, LocalBackend())
    core = sparse.submodules.core_attention
    if not ROTARY_FIRST or config.tensor_model_parallel_size > 1:
        return replace(standard, submodules=replace(standard.submodules, core_attention=core))
    sparse.submodules.linear_q_down_proj = sparse.submodules.linear_kv_down_proj = ColumnParallelLinear
    return sparse


DSA = Variant(adapt=_adapt)
