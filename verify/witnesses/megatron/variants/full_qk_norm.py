"""Q and k norms over all heads at once (MiniMax-M2) instead of Megatron's, which are over one head.

Not in megatron-core: trainers bring it. As in Megatron-Bridge (`models/minimax_m2/layer_specs.py`), a rank holds the
weights of its own heads.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from converters.config.dims import ModelDims
from verify.witnesses.megatron.variants.variant import Variant, not_computed


class NormOverHeads(torch.nn.Module):
    """The weight [heads of this rank x head size] of a norm over the heads of all ranks."""

    forward = not_computed

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = heads * head_dim, eps
        self.weight = torch.nn.Parameter(
            torch.ones(self.width // parallel_state.get_tensor_model_parallel_world_size())
        )

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """What Megatron asks a module for: the weight, cut along its only axis over tensor-parallel ranks."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {"weight": 0}, sharded_offsets
        )
        return state


class QueryNorm(NormOverHeads):
    """The norm of the queries. Megatron gives the size of one head as `hidden_size`."""

    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float) -> None:
        super().__init__(config.num_attention_heads, hidden_size, eps)


class KeyNorm(NormOverHeads):
    """The norm of the keys."""

    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float) -> None:
        super().__init__(config.num_query_groups, hidden_size, eps)


def _adapt(
    dims: ModelDims, config: TransformerConfig, spec: TransformerBlockSubmodules, transformer_engine: bool
) -> None:
    if dims.qk_norm_full:
        for layer in spec.layer_specs:
            modules = layer.submodules.self_attention.submodules
            modules.q_layernorm, modules.k_layernorm = QueryNorm, KeyNorm


FULL_QK_NORM = Variant(adapt=_adapt)
