"""OLMoE, and OLMo 3: norms of q and k over all heads at once, which no released megatron-core has.

OLMoE has experts in every layer and a softmax router that does not renormalize; Megatron-Bridge builds an attention of
its own with these norms. OLMo 3 has norms after attention and MLP alone, and three of four layers with a window:
neither megatron-core nor Megatron-Bridge builds such layers or has names for them, so the rules have HF's on both
sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converters.blocks.decoder import attention, dense_mlp, embeddings, full_qk_norms, moe_mlp
from converters.config.dims import ModelDims, base_dims, read_experts
from converters.config.values import as_json, integer, require, rope_of, sliding_layers, unsupported, window_of
from converters.family import ModelFamily, Release, Unwitnessed
from converters.rules import ParamMapping, decoder, unnamed


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


def read_olmo3_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of an olmo3 config. Source: transformers `Olmo3Config`, `Olmo3Attention`.

    Raises CkptkitError for heads of another size, which SGLang's class does not read.
    """
    require(config, "olmo3", {"attention_bias": False})
    dims = base_dims(
        {"rms_norm_eps": 1e-5, **config},
        qk_norm=True,
        qk_norm_full=True,
        window=window_of(config, absent=4096),
        window_layers=sliding_layers(config, 4),
    )
    if dims.heads * dims.head_dim != dims.hidden:
        raise unsupported(
            f"olmo3 with head_dim {as_json(config.get('head_dim'))}",
            "SGLang takes the hidden size divided by the heads; no released model has another",
        )
    return dims


def olmoe_mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of an olmoe model. Megatron's names: Megatron-Bridge's `models/olmoe/olmoe_bridge.py` at 5c5ae23."""
    return (*embeddings(dims), *attention(dims), *full_qk_norms(dims), *moe_mlp(dims))


def olmo3_mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All tensors of an olmo3 model: attention without the norm before it, and a norm after the MLP."""
    last = decoder(dims, dims.all_layers).rule("", {"post_feedforward_layernorm.weight": (dims.hidden,)})
    return unnamed((*embeddings(dims), *attention(dims)[1:], *full_qk_norms(dims), *dense_mlp(dims), last))


def _unlike_transformers(config: Mapping[str, Any], tokens: int) -> str | None:
    """transformers 5 gives YaRN to the layers with a window too, from the first token on.

    Its own class says that they have none, as OLMo 3's report does; vLLM and SGLang give them none. Run: 5.12.1.
    """
    if rope_of(config)["rope_type"] == "default" or not read_olmo3_dims(config).window_layers:
        return None
    return "transformers scales rotary embedding in layers with a window too (transformers#45945)"


FAMILIES = (
    ModelFamily(
        ("olmoe",),
        ("OlmoeForCausalLM",),
        read_olmoe_dims,
        olmoe_mappings,
        release=Release(classes={"Router": "OlmoeTopKRouter"}),
        # No release that was read has it.
        unwitnessed=Unwitnessed("its norms of q and k run over all heads, Megatron's over one", "Megatron-Bridge"),
    ),
    ModelFamily(
        ("olmo3",),
        ("Olmo3ForCausalLM",),
        read_olmo3_dims,
        olmo3_mappings,
        unlike_transformers=_unlike_transformers,
        unwitnessed=Unwitnessed("its layers have norms after attention and MLP alone, Megatron's before them", None),
    ),
)
