"""GLM-4.7-Flash: the layers of GLM-4.5 with latent attention, and one MTP layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError
from converters.blocks.decoder import appended_drafts
from converters.blocks.latent_attention import SGLANG_DENSE, read_mla
from converters.blocks.sigmoid_moe import dense_of_kinds, read_sigmoid_moe
from converters.config.dims import ModelDims, base_dims, first_layers
from converters.config.values import integer
from converters.families.deepseek import deepseek_v3
from converters.family import EngineClass, ModelFamily, Release


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a glm4_moe_lite config. Source: transformers `Glm4MoeLiteConfig`."""
    mla = read_mla(config)
    return base_dims(
        config,
        qkv_bias=False,
        qk_norm=False,
        mla=mla,
        head_dim=mla.nope,
        dense_layers=_dense_layers(config),
        mtp_layers=integer(config, "num_nextn_predict_layers", 0),
        **read_sigmoid_moe(config, absent={"n_shared_experts": 1, "n_group": 1, "topk_group": 1}),
    )


def _dense_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Dense layers.

    transformers reads them from `mlp_layer_types` (by default only the first), SGLang from `first_k_dense_replace`.
    """
    first = first_layers(config, "first_k_dense_replace", 1)
    kinds = dense_of_kinds(config)
    dense = (0,) if kinds is None else kinds
    if dense != first and config.get("first_k_dense_replace") is not None:
        raise CkptkitError(
            f"config.json: first_k_dense_replace says {len(first)} dense layers, "
            f"mlp_layer_types says layers {list(dense)}",
            "transformers reads the second (without it: the first layer is dense) and SGLang the first; "
            "make them agree",
        )
    return dense


FAMILIES = (
    ModelFamily(
        ("glm4_moe_lite",),
        ("Glm4MoeLiteForCausalLM",),
        read_dims,
        deepseek_v3.mappings,
        release=Release(drafts=appended_drafts, classes={"Router": "Glm4MoeLiteTopkRouter"}),
        engines={
            "sglang": EngineClass(
                dense=SGLANG_DENSE, keys=lambda text: {"first_k_dense_replace": len(_dense_layers(text))}
            )
        },
    ),
)
