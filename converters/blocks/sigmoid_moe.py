"""Mixture of experts of DeepSeek V3, Kimi and GLM: sigmoid scores, an fp32 bias for selection only, shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.converters.config.dims import first_layers, read_experts
from ckptkit.converters.config.values import integer, kinds_of_layers, number, places, require, unsupported
from ckptkit.core.errors import CkptkitError

# Defaults of absent keys in transformers' classes of GLM and others.
ABSENT = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}
# Megatron's sigmoid router always normalizes.
_ONLY = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "norm_topk_prob": True}
_FIRST = "first_k_dense_replace"


def read_sigmoid_moe(config: Mapping[str, Any], absent: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes and routing as arguments of `base_dims`. `absent`: values of absent and null keys that are no error.

    Raises CkptkitError for routing that Megatron does not compute (its `moe_utils.py`:
    `topk_routing_with_score_function`).
    """
    config = {**absent, **{key: value for key, value in config.items() if value is not None}}
    require(config, str(config.get("model_type")), _ONLY)
    shared = integer(config, "n_shared_experts")
    if shared < 1:
        raise unsupported(f"{config.get('model_type')} with n_shared_experts {shared}", "all releases have 1")
    experts = read_experts(config, "n_routed_experts")
    return {
        **experts,
        "shared_ffn": experts["expert_ffn"] * shared,
        "router_sigmoid": True,
        "router_bias": True,
        "router_scale": number(config, "routed_scaling_factor"),
        **_groups(config, experts["experts"], experts["top_k"]),
    }


def _groups(config: Mapping[str, Any], experts: int, top_k: int) -> dict[str, Any]:
    """Group-limited routing.

    The models score a group by its best two experts, Megatron by its best (experts per token / groups per token).
    """
    groups, top_groups = integer(config, "n_group"), integer(config, "topk_group")
    if not 0 < top_groups <= groups or experts % groups:
        message = f"config.json: n_group {groups} with topk_group {top_groups} and {experts} experts is invalid"
        raise CkptkitError(message, "compare n_group and topk_group with the release")
    if groups > 1 and top_k // top_groups != 2:
        raise unsupported(
            f"{top_k} experts per token out of {top_groups} groups",
            f"compare topk_group and num_experts_per_tok with the release: Megatron would score a group by its best "
            f"{top_k // top_groups} experts instead of 2",
        )
    return {"router_groups": groups, "router_top_groups": top_groups}


def dense_of_kinds(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The dense layers in `mlp_layer_types`, which transformers reads, or None without that key."""
    kinds = kinds_of_layers(config, "mlp_layer_types", ("dense", "sparse"))
    return None if kinds is None else places(kinds, "dense")


def dense_layers(config: Mapping[str, Any], without_kinds: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The dense layers, from `mlp_layer_types` (read by transformers) and `first_k_dense_replace` (read by engines).

    `without_kinds`: transformers' default without the first key, or None for the second key. Raises CkptkitError if
    both are present and differ.
    """
    first, dense = first_layers(config, _FIRST, 1), dense_of_kinds(config)
    if dense is None:
        dense = first if without_kinds is None else without_kinds
    if config.get(_FIRST) is not None and dense != first:
        raise CkptkitError(
            f"config.json: {_FIRST} makes {len(first)} layers dense, but mlp_layer_types makes {list(dense)} dense",
            "make both agree: engines read the first key, transformers the second or its default",
        )
    return dense
