"""Seed-OSS-36B: dense, heads wider together than the hidden size, biases only on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.converters.blocks.decoder import dense_model
from ckptkit.converters.config.dims import ModelDims, base_dims
from ckptkit.converters.config.values import require
from ckptkit.converters.family import ModelFamily

# vLLM's class always has these biases.
_BIASES = {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False}


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a seed_oss config. Source: transformers `SeedOssConfig`, `SeedOssAttention`."""
    require(config, "seed_oss", _BIASES)
    return base_dims({"head_dim": 128, "rms_norm_eps": 1e-6, **config}, qkv_bias=True)


FAMILIES = (ModelFamily(("seed_oss",), ("SeedOssForCausalLM",), read_dims, dense_model),)
