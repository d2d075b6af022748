"""Ministral 3 and Mistral Small 3.1 and later: a language model under `language_model.`, beside a vision tower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.core.errors import CkptkitError
from converters.blocks.decoder import dense_model
from converters.config.dims import ModelDims
from converters.config.tie import TieFlag
from converters.config.values import flag
from converters.families import ministral3, mistral
from converters.family import ModelFamily

_TEXT = {"ministral3": ministral3.read_dims, "mistral": mistral.read_dims}


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of the language model. Source: transformers `Mistral3Config`, which ties by default."""
    text = config.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") not in _TEXT:
        raise CkptkitError(
            "config.json: text_config of mistral3 is not that of a ministral3 or mistral model",
            "compare it with the release",
        )
    tied = flag(config, "tie_word_embeddings", True)
    dims = _TEXT[text["model_type"]](text)
    return replace(dims, tied=tied, root="language_model.model.", head="language_model.lm_head.weight")


FAMILIES = (
    ModelFamily(
        ("mistral3",),
        ("Mistral3ForConditionalGeneration",),
        read_dims,
        dense_model,
        carried=("vision_tower.", "multi_modal_projector."),
        tie=TieFlag(absent=True),
        release=None,  # no INT4: what SGLang fuses in the vision tower and asks `ignore` about is not listed
    ),
)
