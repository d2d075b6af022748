"""Mistral 7B, Nemo 12B and models of their architecture, Ministral 3, and Mistral Small 3.1 and later.

Dense, in the first 7B with a sliding window on every layer. Ministral 3 has YaRN, and queries scaled by their position
beyond the length that YaRN starts from: megatron-core has no such scale, so up to that length (16,384 tokens in the
releases) it computes the same model, beyond it another one. `mistral3` is one of both under `language_model.`, with a
vision tower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptkit.converters.blocks.decoder import ROTARY_FREQUENCIES, dense_model
from ckptkit.converters.config.dims import ModelDims, base_dims
from ckptkit.converters.config.values import flag, integer, number, require, rope_of, text_config_of, window_of
from ckptkit.converters.family import ModelFamily, Release

_ROOT = "language_model.model."


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a mistral config. Source: transformers `MistralConfig` (the default window is 4096)."""
    require(config, "mistral", {"layer_types": None}, "use model_type ministral for attention that differs by layer")
    return base_dims(config, window=window_of(config, absent=4096))


def read_ministral3_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a ministral3 config. Source: transformers `Ministral3Config`, `get_llama_4_attn_scale`."""
    require(config, "ministral3", {"sliding_window": None})
    rope = rope_of(config)
    scaled = number(rope, "llama_4_scaling_beta") != 0
    return base_dims(
        {"head_dim": 128, "rms_norm_eps": 1e-5, **config},
        query_scale_from=integer(rope, "original_max_position_embeddings") if scaled else None,
    )


_TEXT = {"ministral3": read_ministral3_dims, "mistral": read_dims}


def read_mistral3_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of the language model. Source: transformers `Mistral3Config`, which ties by default."""
    text = text_config_of(config, *_TEXT)
    tied = flag(config, "tie_word_embeddings", True)
    return replace(_TEXT[text["model_type"]](text), tied=tied, root=_ROOT, head="language_model.lm_head.weight")


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
    ModelFamily(("mistral",), ("MistralForCausalLM",), read_dims, dense_model, passthrough_suffixes=ROTARY_FREQUENCIES),
    ModelFamily(("ministral3",), ("Ministral3ForCausalLM",), read_ministral3_dims, dense_model),
    ModelFamily(
        ("mistral3",),
        ("Mistral3ForConditionalGeneration",),
        read_mistral3_dims,
        dense_model,
        passthrough=("vision_tower.", "multi_modal_projector."),
        release=Release(_ROOT, "language_model.lm_head", nested=True, linears_outside=_linears_outside),
    ),
)
