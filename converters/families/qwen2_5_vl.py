"""Qwen2.5-VL (3B, 7B, 72B): the language model is Qwen2's, the vision tower is passed through.

Multimodal rotary embedding is the plain one wherever there is only text: all three axes of a text token's position are
the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.converters.blocks.decoder import dense_model
from ckptkit.converters.config.dims import ModelDims, base_dims
from ckptkit.converters.config.values import flag, integer, rope_of, without_windows
from ckptkit.converters.family import ModelFamily, Release


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a qwen2_5_vl config, flat or nested. Source: transformers `Qwen2_5_VLTextConfig`."""
    text = {**_RELEASE.text(config), "model_type": config["model_type"]}
    without_windows(text)
    rope = rope_of(text, 1e6)
    if rope["rope_type"] == "mrope":
        text |= {"rope_parameters": {"rope_theta": rope["rope_theta"]}, "rope_scaling": None}
    text["tie_word_embeddings"] = flag(config, "tie_word_embeddings", False)
    return base_dims(text, qkv_bias=True, default_theta=1e6)


def _linears_outside(config: Mapping[str, Any]) -> Iterator[str]:
    """The Linear layers of the vision tower, by names of releases and transformers' `Qwen2_5_VisionTransformer`."""
    blocks = range(integer(config["vision_config"], "depth", 32))
    parts = ("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    for root in ("visual.", "model.visual."):
        yield from (f"{root}blocks.{block}.{part}" for block in blocks for part in parts)
        yield from (f"{root}merger.mlp.{number}" for number in (0, 2))


_RELEASE = Release(nested=True, flat=True, linears_outside=_linears_outside, model_type="qwen2_5_vl_text")
FAMILIES = (
    ModelFamily(
        ("qwen2_5_vl",),
        ("Qwen2_5_VLForConditionalGeneration",),
        read_dims,
        dense_model,
        passthrough=("visual.",),
        release=_RELEASE,
    ),
)
