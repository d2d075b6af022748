"""Ministral 3 and Mistral Small 3.1 and later: a language model under `language_model.`, beside a vision tower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptkit.core.errors import CkptkitError
from converters.blocks.decoder import dense_model
from converters.config.dims import ModelDims
from converters.config.tie import TieFlag
from converters.config.values import flag, integer
from converters.families import ministral3, mistral
from converters.family import EngineClass, ModelFamily, Release

_ROOT = "language_model.model."
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
    return replace(dims, tied=tied, root=_ROOT, head="language_model.lm_head.weight")


def _linears_outside(config: Mapping[str, Any]) -> Iterator[str]:
    """The Linear layers of the vision tower and of the projector behind it.

    Source: transformers `PixtralVisionModel`, `Mistral3MultiModalProjector`.
    """
    modules = ["multi_modal_projector." + name for name in ("patch_merger.merging_layer", "linear_1", "linear_2")]
    for layer in range(integer(config["vision_config"], "num_hidden_layers", 24)):
        at = f"vision_tower.transformer.layers.{layer}."
        modules += [f"{at}attention.{name}_proj" for name in "qkvo"]
        modules += [f"{at}feed_forward.{name}_proj" for name in ("gate", "up", "down")]
    return (f"{prefix}{module}" for prefix in ("", "model.") for module in modules)


FAMILIES = (
    ModelFamily(
        ("mistral3",),
        ("Mistral3ForConditionalGeneration",),
        read_dims,
        dense_model,
        carried=("vision_tower.", "multi_modal_projector."),
        tie=TieFlag(absent=True),
        release=Release(_ROOT, "language_model.lm_head", nested=True, linears_outside=_linears_outside),
        engines={
            "sglang": EngineClass(
                root=(_ROOT, "model."), outside=((".attention.o_proj", ".attention.proj"),), fp8_blocks=False
            ),
            "vllm": EngineClass(fp8_blocks=False),
        },
    ),
)
