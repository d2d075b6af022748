"""Finds the family of a model by the exact `model_type` of its config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError, UnsupportedError
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
FAMILIES: dict[str, ModelFamily] = {
    model_type: module.FAMILY for module in _MODULES for model_type in module.FAMILY.model_types
}


# What such a model is, by its class name, where many are published; the first that fits.
_OTHERS = (
    (
        r"(?i).*(eagle|nextn|mtp|medusa|speculator|draft).*",
        "a draft model for speculative decoding",
        "convert the model that it drafts for",
    ),
    (
        r"(?i).*(classification|reward).*",
        "a classifier or reward model",
        "Megatron's language model has an output layer over the vocabulary in place of its head",
    ),
    (r".*Model", "a model without an output layer", "convert the language model that it was made from"),
)


def family_of(config: Mapping[str, Any]) -> ModelFamily:
    """The family of a config.

    Raises CkptkitError for an unknown `model_type`, naming the known ones, and UnsupportedError for a class that is none of the family's.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CkptkitError(
            f"config.json: model_type {model_type!r} is not supported", f"supported: {', '.join(sorted(FAMILIES))}"
        )
    _check_architectures(config.get("architectures"), FAMILIES[model_type], model_type)
    return FAMILIES[model_type]


def _check_architectures(stated: Any, family: ModelFamily, model_type: str) -> None:
    """Passes an absent key, and a list with a class of the family in it."""
    names = [stated] if isinstance(stated, str) else stated or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CkptkitError(
            f"config.json: architectures is {stated!r:.80}, not a list of class names", "restore it from the release"
        )
    if not names or set(names) & set(family.architectures):
        return
    what, hint = next(
        (words for pattern, *words in _OTHERS if re.fullmatch(pattern, names[0])),
        ("another model", "compare config.json with the release"),
    )
    known = ", ".join(family.architectures)
    raise UnsupportedError(
        f"config.json: {names[0]} of model_type {model_type!r} is {what}, which is not supported",
        f"{hint}; supported: {known}",
    )
