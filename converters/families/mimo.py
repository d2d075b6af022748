"""MiMo-7B: Qwen2 with multi-token prediction layers; their input projection takes [hidden state, embedding]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.converters.blocks.decoder import attention, dense_mlp, embeddings, joining_rules, layer_count
from ckptkit.converters.config.dims import ModelDims, base_dims
from ckptkit.converters.config.values import integer, require, without_windows
from ckptkit.converters.family import Draft, ModelFamily, Release
from ckptkit.converters.ops.basic import SwapHalves
from ckptkit.converters.rules import NamePrefix, ParamMapping

# Behaviour of the published modeling code, Megatron and SGLang, which ignore these keys.
_ONLY = {"attention_bias": True, "use_mrope": False}


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a mimo config. Source: the published `MiMoConfig`, a `Qwen2Config` with `num_nextn_predict_layers`."""
    without_windows(config)
    require(config, "mimo", _ONLY)
    return base_dims(config, qkv_bias=True, mtp_layers=integer(config, "num_nextn_predict_layers", 0))


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    rules = [*embeddings(dims), *attention(dims), *dense_mlp(dims)]
    for depth in range(dims.mtp_layers):
        rules += _mtp_layer(dims, depth)
    return tuple(rules)


def _mtp_layer(dims: ModelDims, depth: int) -> tuple[ParamMapping, ...]:
    """Multi-token prediction layer `depth`.

    Source of the order in input_proj: the published `MiMoMTPLayers`, SGLang's and vLLM's `mimo_mtp`.
    """
    megatron, hf = f"mtp.layers.{depth}.", f"model.mtp_layers.{depth}."
    layer = NamePrefix(megatron + "transformer_layer.", hf, None)
    names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    around = joining_rules(dims, NamePrefix(megatron, hf, None), names, SwapHalves())
    return (*around, *attention(dims, layer), *dense_mlp(dims, layer))


def _drafts(text: Mapping[str, Any], root: str) -> tuple[Draft, ...]:
    # SGLang's class gives the layer's modules no prefix, and vLLM numbers the layer after the model's.
    first, count = layer_count(text, "num_hidden_layers"), layer_count(text, "num_nextn_predict_layers")
    numbers = "|".join(map(str, range(first, first + count)))
    entry = rf"re:(model\.mtp_layers|model\.layers\.({numbers})|self_attn|mlp)\..*"
    roots = [(f"model.mtp_layers.{depth}.", f"model.layers.{first + depth}.") for depth in range(count)]
    return tuple(Draft(own, "", entry, own, f"{own}input_proj", vllm=vllm) for own, vllm in roots)


FAMILIES = (
    ModelFamily(
        ("mimo",), ("MiMoForCausalLM",), read_dims, mappings, release=Release(drafts=_drafts, model_type="qwen2")
    ),
)
