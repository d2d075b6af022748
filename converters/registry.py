"""Finds the family of a model by the exact `model_type` of its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.errors import CkptkitError
from converters.families import (
    deepseek_v3,
    deepseek_v32,
    gemma3,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    gpt_oss,
    kimi_k25,
    llama,
    mimo,
    minimax_m2,
    mistral,
    mixtral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
)
from converters.rules import ModelFamily

_MODULES = (
    deepseek_v3,
    deepseek_v32,
    gemma3,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    gpt_oss,
    kimi_k25,
    llama,
    mimo,
    minimax_m2,
    mistral,
    mixtral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
)
FAMILIES: dict[str, ModelFamily] = {model_type: module.FAMILY for module in _MODULES for model_type in module.FAMILY.model_types}


def family_of(config: Mapping[str, Any]) -> ModelFamily:
    """The family of a config. Raises CkptkitError for an unknown `model_type`, naming the known ones."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CkptkitError(f"config.json: model_type {model_type!r} is not supported", f"supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]
