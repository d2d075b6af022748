"""DeepSeek V3.2.

DeepSeek V3 with an indexer in every layer, the MTP layer too, that chooses the tokens attention sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError
from converters.blocks.decoder import ROTARY_FREQUENCIES, appended_drafts, multi_token_prediction
from converters.blocks.indexer import indexer, read_indexer, slime_indexer
from converters.blocks.latent_attention import read_mla
from converters.blocks.sigmoid_moe import read_sigmoid_moe
from converters.config.dims import ModelDims, base_dims, first_layers
from converters.config.values import integer
from converters.families.deepseek import deepseek_v3
from converters.family import ModelFamily, Release
from converters.rules import ParamMapping


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a deepseek_v32 config.

    Source: transformers `DeepseekV32Config`; its indexer turns the rotary dimensions as halves.
    """
    return sparse_dims(config, interleaved=False, absent={})


def sparse_dims(config: Mapping[str, Any], *, interleaved: bool | None, absent: Mapping[str, Any]) -> ModelDims:
    """Sizes of a DeepSeek V3 with an indexer.

    `interleaved` and `absent` are as in `read_indexer` and `read_sigmoid_moe`.
    """
    mla = read_mla(config)
    dims = base_dims(
        config,
        qkv_bias=False,
        qk_norm=False,
        mla=mla,
        head_dim=mla.nope,
        indexer=read_indexer(config, mla, interleaved=interleaved),
        dense_layers=_dense_layers(config),
        mtp_layers=integer(config, "num_nextn_predict_layers", 0),
        **read_sigmoid_moe(config, absent=absent),
    )
    if dims.mtp_layers > 1 and len(dims.indexer.layers) < dims.layers:  # type: ignore[union-attr]
        raise CkptkitError(
            f"config.json: {dims.mtp_layers} multi-token prediction layers with shared indexers are not supported",
            "Megatron would share the indexer of the first; no released model has more than one",
            code="unsupported",
        )
    return dims


def _dense_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Dense layers.

    transformers reads them from `mlp_layer_types` where that is given, SGLang always from `first_k_dense_replace`.
    """
    first, kinds = first_layers(config, "first_k_dense_replace", 3), config.get("mlp_layer_types")
    if kinds is not None and kinds != ["dense"] * len(first) + ["sparse"] * (
        integer(config, "num_hidden_layers") - len(first)
    ):
        raise CkptkitError(
            f"config.json: first_k_dense_replace says {len(first)} dense layers, mlp_layer_types says something else",
            "transformers reads the second and SGLang the first; make them agree",
        )
    return first


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of a DeepSeek V3 with an indexer, in megatron-core's names."""
    return _with_indexer(dims, indexer)


def slime_mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """The same in the names of slime's modules."""
    return _with_indexer(dims, slime_indexer)


def _with_indexer(dims: ModelDims, rules: Callable[..., tuple[ParamMapping, ...]]) -> tuple[ParamMapping, ...]:
    places = [multi_token_prediction(dims, depth)[0] for depth in range(dims.mtp_layers)]
    return (*deepseek_v3.mappings(dims), *(rule for at in (None, *places) for rule in rules(dims, at)))


FAMILIES = (
    ModelFamily(
        ("deepseek_v32",),
        ("DeepseekV32ForCausalLM",),
        read_dims,
        mappings,
        {"slime": slime_mappings},
        carried_ends=ROTARY_FREQUENCIES,
        release=Release(drafts=appended_drafts, classes={"Router": "DeepseekV32TopkRouter"}),
        engines={"sglang": deepseek_v3.SGLANG},
    ),
)
