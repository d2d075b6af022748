"""Mixtral 8x7B and 8x22B.

Every layer routed, experts named w1 (gate), w3 (up) and w2 (down), softmax over the chosen experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.converters.blocks.decoder import ROTARY_FREQUENCIES, W1_W3_W2, attention, embeddings, moe_mlp
from ckptkit.converters.config.dims import ModelDims, base_dims, read_experts
from ckptkit.converters.config.values import window_of
from ckptkit.converters.family import FusedExperts, ModelFamily, Release
from ckptkit.converters.rules import ParamMapping


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a mixtral config.

    Source: transformers `MixtralConfig` (no window where the key is absent), `MixtralTopKRouter`.
    """
    experts = read_experts(config, "num_local_experts", "intermediate_size")
    return base_dims(config, default_theta=1e6, window=window_of(config), **experts)


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    return (*embeddings(dims), *attention(dims), *moe_mlp(dims, block="block_sparse_moe.", names=W1_W3_W2))


FAMILIES = (
    ModelFamily(
        ("mixtral",),
        ("MixtralForCausalLM",),
        read_dims,
        mappings,
        fused=FusedExperts(renames_tensors=True),
        passthrough_suffixes=ROTARY_FREQUENCIES,
        release=Release(moe="block_sparse_moe", experts=W1_W3_W2, classes={"Router": "MixtralTopKRouter"}),
    ),
)
