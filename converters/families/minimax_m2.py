"""MiniMax-M2 to M2.7.

Every layer routed, sigmoid router with an fp32 selection bias, q/k norms over all heads at once, partial rope.

config.json declares multi-token prediction modules (`use_mtp`, `num_mtp_modules`), but the published weights have none,
so the rules and Megatron's arguments have none. A checkpoint with tensors of such modules is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ckptkit.converters.blocks.decoder import W1_W3_W2, attention, embeddings, full_qk_norms, moe_mlp
from ckptkit.converters.config.dims import ModelDims, base_dims, read_experts
from ckptkit.converters.config.values import integer, require, rotary_fraction, unsupported
from ckptkit.converters.family import FusedExperts, ModelFamily, Release
from ckptkit.converters.rules import ParamMapping
from ckptkit.core.printable import shortened

# Values in every release, which the rules and Megatron's arguments below require.
_FIXED = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
    "sliding_window": None,
}


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a minimax_m2 config. Source: transformers `MiniMaxM2Config` and the releases' own config.json."""
    require(config, "minimax_m2", _FIXED)
    # Softmax attention on every layer.
    if any(kind != 1 for kind in config.get("attn_type_list") or ()):
        raise unsupported(f"attn_type_list {shortened(config['attn_type_list'])}", "the releases have 1 in every layer")
    head_dim = integer(config, "head_dim", 128)
    return base_dims(
        {**config, "head_dim": head_dim, "partial_rotary_factor": rotary_fraction(config, head_dim)},
        qk_norm=True,
        qk_norm_full=True,
        default_theta=5e6,
        router_sigmoid=True,
        router_bias=True,
        **read_experts(config, "num_local_experts", "intermediate_size"),
    )


def _mappings(dims: ModelDims, *, norm: str, axis: int | None) -> tuple[ParamMapping, ...]:
    """All rules of a minimax_m2 model, with q/k norms called `norm` and cut along `axis` over tensor-parallel ranks."""
    norms = full_qk_norms(dims, norm, axis)
    experts = moe_mlp(dims, block="block_sparse_moe.", bias="e_score_correction_bias", names=W1_W3_W2)
    return (*embeddings(dims), *attention(dims), *norms, *experts)


# Two stacks train these models, with different norms in Megatron's attention: Megatron-Bridge under the names of
# Megatron's norms per head, sharded like the heads; slime under another name, complete on every rank.
mappings = partial(_mappings, norm="{}_layernorm", axis=0)


FAMILIES = (
    ModelFamily(
        ("minimax_m2",),
        ("MiniMaxM2ForCausalLM",),
        read_dims,
        mappings,
        {"slime": partial(_mappings, norm="{}_norm", axis=None)},
        fused=FusedExperts(renames_tensors=True),
        release=Release(moe="block_sparse_moe", experts=W1_W3_W2, classes={"Router": "MiniMaxM2TopKRouter"}),
    ),
)
