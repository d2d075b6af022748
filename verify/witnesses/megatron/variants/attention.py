"""Attention that Megatron's local spec does not build: latent (MLA), sparse (DSA), with norms over all heads.

Megatron's local spec of latent attention has a DotProductAttention without head sizes, which expects values as wide as
queries; only Transformer Engine's has other sizes. Norms of queries and keys over all heads (MiniMax-M2) are not in
megatron-core: as in Megatron-Bridge (`models/minimax_m2/layer_specs.py`), a rank has the weights of its own heads.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as megatron_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from ckptkit.converters.config.dims import ModelDims
from ckptkit.verify.witnesses.megatron.variants.variant import BlockSpec, Variant, WholeLinear, not_computed


class LatentDotProductAttention(DotProductAttention):  # type: ignore[misc]
    """Megatron's core attention, for values of another size than queries and keys. It has no parameters."""

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The base class first builds one without sizes. They only shape the output: the softmax scale is an argument.
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def _adapt_latent(dims: ModelDims, config: TransformerConfig, spec: BlockSpec, transformer_engine: bool) -> None:
    if dims.mla is None or transformer_engine:
        return
    if not isinstance(multi_latent_attention.TELinear, type):
        # Without Transformer Engine its classes are mocks, which `isinstance` in the module does not accept.
        multi_latent_attention.HAVE_TE = False
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        if attention.core_attention is DotProductAttention:
            attention.core_attention = LatentDotProductAttention


MLA = Variant(adapt=_adapt_latent)

# From megatron-core 0.19 on, the indexer rotates the first dimensions of a head, as the releases do.
ROTARY_FIRST = "dsa_indexer_rope_interleaved" in inspect.signature(TransformerConfig).parameters


class LocalBackend(LocalSpecProvider):  # type: ignore[misc]
    """Megatron's local modules, with the linear layer that they lack."""

    def linear(self) -> type:
        return WholeLinear


def _adapt_sparse(dims: ModelDims, config: TransformerConfig, spec: BlockSpec, transformer_engine: bool) -> None:
    if dims.indexer is None:
        return
    if transformer_engine:
        attention = megatron_specs.get_experimental_attention_variant_module_spec(config)
    else:
        attention = _local_sparse(config, spec.layer_specs[0].submodules.self_attention)
    for layer in spec.layer_specs:
        layer.submodules.self_attention = attention


def _local_sparse(config: TransformerConfig, standard: ModuleSpec) -> ModuleSpec:
    """The spec of sparse attention with local modules, or its core in the standard spec if that does not build."""
    sparse = megatron_specs.get_dsa_module_spec_for_backend(config, LocalBackend())
    core = sparse.submodules.core_attention
    # Before 0.19 its latent attention needs norms that are fused into linear layers; since then it needs, with tensor
    # parallelism, the sequence parallelism that local norms lack. Parameters have the same names in both.
    if not ROTARY_FIRST or config.tensor_model_parallel_size > 1:
        return replace(standard, submodules=replace(standard.submodules, core_attention=core))
    sparse.submodules.linear_q_down_proj = sparse.submodules.linear_kv_down_proj = ColumnParallelLinear
    return sparse


DSA = Variant(adapt=_adapt_sparse)


class NormOverHeads(torch.nn.Module):
    """The weight [heads of this rank x head size] of a norm over the heads of all ranks."""

    forward = not_computed

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = heads * head_dim, eps
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        self.weight = torch.nn.Parameter(torch.ones(self.width // ranks))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Megatron's protocol for modules: the weight, divided along its only axis over tensor-parallel ranks."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {"weight": 0}, sharded_offsets
        )
        return state


class QueryNorm(NormOverHeads):
    """The norm of the queries. Megatron passes the size of one head as `hidden_size`."""

    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float) -> None:
        super().__init__(config.num_attention_heads, hidden_size, eps)


class KeyNorm(NormOverHeads):
    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float) -> None:
        super().__init__(config.num_query_groups, hidden_size, eps)


def _adapt_qk_norms(dims: ModelDims, config: TransformerConfig, spec: BlockSpec, transformer_engine: bool) -> None:
    if dims.qk_norm_full:
        for layer in spec.layer_specs:
            modules = layer.submodules.self_attention.submodules
            modules.q_layernorm, modules.k_layernorm = QueryNorm, KeyNorm


FULL_QK_NORM = Variant(adapt=_adapt_qk_norms)
