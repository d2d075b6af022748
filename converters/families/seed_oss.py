"""Seed-OSS-36B: dense, heads wider together than the hidden size, biases on queries, keys and values alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError
from converters.blocks.decoder import attention, dense_mlp, embeddings
from converters.config.dims import ModelDims, base_dims
from converters.config.values import flag
from converters.family import ModelFamily
from converters.rules import ParamMapping

# vLLM's class has these biases whatever the config says.
_BIASES = {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False}


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a seed_oss config. Source: transformers `SeedOssConfig`, `SeedOssAttention`."""
    for key, only in _BIASES.items():
        if flag(config, key, only) != only:
            raise CkptkitError(
                f"config.json: seed_oss with {key} {str(not only).lower()} is not supported",
                "no released model uses it",
                code="unsupported",
            )
    absent: dict[str, Any] = {"head_dim": 128, "rms_norm_eps": 1e-6}
    return base_dims({**absent, **config}, qkv_bias=True, qk_norm=False)


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of a seed_oss model."""
    return (*embeddings(dims), *attention(dims), *dense_mlp(dims))


FAMILIES = (ModelFamily(("seed_oss",), ("SeedOssForCausalLM",), read_dims, mappings),)
