"""GLM-4.5, 4.6 and 4.7.

First layers dense, sigmoid router with an fp32 selection bias, shared experts, q/k norms in the large one, one MTP
layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converters.blocks.decoder import (
    appended_drafts,
    attention,
    dense_mlp,
    embeddings,
    moe_mlp,
    mtp_copies,
    multi_token_prediction,
)
from converters.blocks.sigmoid_moe import read_sigmoid_moe
from converters.config.dims import ModelDims, base_dims, first_layers
from converters.config.values import flag, integer
from converters.family import EngineClass, ModelFamily, Release
from converters.rules import ParamMapping


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a glm4_moe config. Source: transformers `Glm4MoeConfig`."""
    return base_dims(
        {"partial_rotary_factor": 0.5, **config},
        qkv_bias=flag(config, "attention_bias", False),
        qk_norm=flag(config, "use_qk_norm", False),
        dense_layers=first_layers(config, "first_k_dense_replace", 1),
        mtp_layers=integer(config, "num_nextn_predict_layers", 0),
        **read_sigmoid_moe(
            config, absent={"n_shared_experts": 1, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
        ),
    )


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of a glm4_moe model."""
    tables = embeddings(
        dims, embed_copies=mtp_copies(dims, "embed_tokens"), head_copies=mtp_copies(dims, "shared_head.head")
    )
    rules = [*tables, *attention(dims), *dense_mlp(dims), *moe_mlp(dims, "shared_experts")]
    for depth in range(dims.mtp_layers):
        layer, around = multi_token_prediction(dims, depth)
        rules += [*around, *attention(dims, layer), *moe_mlp(dims, "shared_experts", layer)]
    return tuple(rules)


FAMILIES = (
    ModelFamily(
        ("glm4_moe",),
        ("Glm4MoeForCausalLM",),
        read_dims,
        mappings,
        release=Release(drafts=appended_drafts, classes={"Router": "Glm4MoeTopkRouter"}),
        engines={"sglang": EngineClass(joins_shared_expert=True)},
    ),
)
