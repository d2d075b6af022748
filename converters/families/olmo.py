"""OLMoE: norms of q and k over all heads at once, which no released megatron-core has.

It has experts in every layer and a softmax router that does not renormalize; Megatron-Bridge builds an attention of its
own with these norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.converters.blocks.decoder import attention, embeddings, full_qk_norms, moe_mlp
from ckptkit.converters.config.dims import ModelDims, base_dims, read_experts
from ckptkit.converters.config.values import integer, require
from ckptkit.converters.family import MegatronGap, ModelFamily, Release
from ckptkit.converters.rules import ParamMapping


def read_olmoe_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of an olmoe config. Source: transformers `OlmoeConfig`, `OlmoeAttention`, `OlmoeTopKRouter`.

    Raises CkptkitError for what SGLang's class does not compute: it never renormalizes and never clips, its norm of the
    keys is as wide as that of the queries, and its epsilon is fixed.
    """
    heads = integer(config, "num_attention_heads")
    only = {"attention_bias": False, "norm_topk_prob": False, "clip_qkv": None}
    require(config, "olmoe", {**only, "num_key_value_heads": heads, "rms_norm_eps": 1e-5})
    return base_dims(
        {**config, "rms_norm_eps": 1e-5},
        qk_norm=True,
        qk_norm_full=True,
        router_normalize=False,
        **read_experts(config, ffn="intermediate_size"),
    )


def olmoe_mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of an olmoe model. Megatron's names: Megatron-Bridge's `models/olmoe/olmoe_bridge.py` at 5c5ae23."""
    return (*embeddings(dims), *attention(dims), *full_qk_norms(dims), *moe_mlp(dims))


FAMILIES = (
    ModelFamily(
        ("olmoe",),
        ("OlmoeForCausalLM",),
        read_olmoe_dims,
        olmoe_mappings,
        release=Release(classes={"Router": "OlmoeTopKRouter"}),
        # No release that was read has it.
        unwitnessed=MegatronGap("its norms of q and k span all heads, Megatron's one head", "Megatron-Bridge"),
    ),
)
