"""OLMoE: every layer with experts, softmax router that does not renormalize, q/k norms over all heads at once.

No released megatron-core has such norms. Megatron-Bridge builds an attention of its own with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from converters.blocks.decoder import attention, embeddings, full_qk_norms, moe_mlp
from converters.config.dims import ModelDims, base_dims
from converters.config.values import integer, require_flags
from converters.family import ModelFamily, Release, Unwitnessed
from converters.rules import ParamMapping


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of an olmoe config. Source: transformers `OlmoeConfig`, `OlmoeAttention`, `OlmoeTopKRouter`.

    Raises CkptkitError for what SGLang's class does not compute: it never renormalizes and never clips, its norm of the
    keys is as wide as that of the queries, and its epsilon is fixed.
    """
    require_flags(config, "olmoe", {"attention_bias": False, "norm_topk_prob": False})
    only = {"clip_qkv": None, "num_key_value_heads": integer(config, "num_attention_heads"), "rms_norm_eps": 1e-5}
    for key, value in only.items():
        if config.get(key) not in (None, value):
            raise CkptkitError(
                f"config.json: olmoe with {key} {shortened(config[key])} is not supported",
                f"the releases are with {value}, and SGLang computes no other model",
                code="unsupported",
            )
    return base_dims(
        {**config, "rms_norm_eps": 1e-5},
        qkv_bias=False,
        qk_norm=True,
        qk_norm_full=True,
        experts=integer(config, "num_experts"),
        top_k=integer(config, "num_experts_per_tok"),
        expert_ffn=integer(config, "intermediate_size"),
        router_normalize=False,
    )


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of an olmoe model. Megatron's names: Megatron-Bridge's `models/olmoe/olmoe_bridge.py` at 5c5ae23."""
    return (*embeddings(dims), *attention(dims), *full_qk_norms(dims), *moe_mlp(dims))


FAMILIES = (
    ModelFamily(
        ("olmoe",),
        ("OlmoeForCausalLM",),
        read_dims,
        mappings,
        release=Release(classes={"Router": "OlmoeTopKRouter"}),
        # No release that was read has it.
        unwitnessed=Unwitnessed("its norms of q and k run over all heads, Megatron's over one", "Megatron-Bridge"),
    ),
)
