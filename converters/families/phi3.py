"""Phi-4 and Phi-3 of the same architecture: dense, q, k and v in one matrix, gate and up in another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.converters.blocks.decoder import attention, embeddings, mlp_in_one
from ckptkit.converters.config.dims import ModelDims, base_dims
from ckptkit.converters.config.values import rope_of, unsupported, window_of
from ckptkit.converters.family import ModelFamily
from ckptkit.converters.rules import ParamMapping, decoder


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a phi3 config. Source: transformers `Phi3Config`, `Phi3Attention` (no config enables its biases)."""
    kind = rope_of(config)["rope_type"]
    if kind != "default":  # "su" and "yarn" are its older names of longrope
        raise unsupported(
            f"phi3 with rope scaling {kind}",
            "Megatron has no longrope, which also scales attention of short prompts (Phi-4-mini, Phi-3.5, and Phi-3 "
            "with 128k tokens have it)",
        )
    return base_dims({"rms_norm_eps": 1e-5, **config}, window=window_of(config))


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    return (*embeddings(dims), *attention(dims, joined="qkv_proj"), *mlp_in_one(dims, decoder(dims, dims.all_layers)))


FAMILIES = (ModelFamily(("phi3",), ("Phi3ForCausalLM",), read_dims, mappings),)
