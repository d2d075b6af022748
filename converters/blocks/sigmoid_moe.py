"""Mixture of experts as DeepSeek V3, Kimi and GLM have it.

Sigmoid scores, an fp32 bias that only helps to select, shared experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from converters.config.values import flag, integer, number


def read_sigmoid_moe(config: Mapping[str, Any], absent: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes and routing as arguments of `base_dims`.

    `absent` says what absent and null keys mean where that is not an error.

    Raises CkptkitError for routing that Megatron does not compute (its `moe_utils.py`:
    `topk_routing_with_score_function`).
    """
    config = {**absent, **{key: value for key, value in config.items() if value is not None}}
    kind = config.get("model_type")
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if config.get(key, only) != only:
            raise CkptkitError(
                f"config.json: {kind} with {key} {shortened(config[key])} is not supported",
                f"released models have {only!r}",
                code="unsupported",
            )
    if not flag(config, "norm_topk_prob", True):
        raise CkptkitError(
            f"config.json: {kind} with norm_topk_prob false is not supported",
            "Megatron's sigmoid router always normalizes",
            code="unsupported",
        )
    shared = integer(config, "n_shared_experts")
    if shared < 1:
        raise CkptkitError(
            f"config.json: {kind} without shared experts is not supported",
            "no released model is without one",
            code="unsupported",
        )
    expert_ffn = integer(config, "moe_intermediate_size")
    return {
        "experts": integer(config, "n_routed_experts"),
        "top_k": integer(config, "num_experts_per_tok"),
        "expert_ffn": expert_ffn,
        "shared_ffn": expert_ffn * shared,
        "router_sigmoid": True,
        "router_bias": True,
        "router_scale": number(config, "routed_scaling_factor"),
        **_groups(config),
    }


def _groups(config: Mapping[str, Any]) -> dict[str, Any]:
    """Group-limited routing.

    The models score a group by its best two experts, Megatron by its best (experts a token / groups a token).
    """
    groups, top_groups = integer(config, "n_group"), integer(config, "topk_group")
    experts, top_k = integer(config, "n_routed_experts"), integer(config, "num_experts_per_tok")
    if not 0 < top_groups <= groups or experts % groups:
        raise CkptkitError(
            f"config.json: {top_groups} of {groups} groups of {experts} experts cannot be right",
            "compare n_group and topk_group with the release",
        )
    if groups > 1 and top_k // top_groups != 2:
        raise CkptkitError(
            f"config.json: {top_k} experts a token out of {top_groups} groups is not supported",
            f"Megatron would score a group by its best {top_k // top_groups} experts, not by its best 2; "
            "no released model needs that",
            code="unsupported",
        )
    return {"router_groups": groups, "router_top_groups": top_groups}


def dense_of_kinds(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The dense layers by `mlp_layer_types`, which transformers reads; None without that key.

    Raises CkptkitError for a list of another length, and for other words.
    """
    kinds, layers = config.get("mlp_layer_types"), integer(config, "num_hidden_layers")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers or not {"dense", "sparse"}.issuperset(map(str, kinds)):
        raise CkptkitError(
            "config.json: mlp_layer_types does not say 'dense' or 'sparse' for every layer",
            "compare it with the release",
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
