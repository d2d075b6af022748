"""Qwen3.5 and Qwen3.6, dense and MoE.

Like Qwen3-Next, with linear attention's input projection in four tensors, and a vision tower, which is passed through.
Multimodal rotary embedding equals the plain one for text, since all three axes of a text token's position are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ckptkit.converters.config.dims import ModelDims, base_dims, read_experts
from ckptkit.converters.config.values import NESTED_ROOT, integer, text_part
from ckptkit.converters.families.qwen3 import qwen_vision
from ckptkit.converters.families.qwen3_next import (
    linear_model,
    qwen_drafts,
    read_linear_attention,
    read_mtp_layers,
    refuse_unsupported,
)
from ckptkit.converters.family import ModelFamily, Release


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a qwen3_5 or qwen3_5_moe config, or of only its text part.

    Source: transformers `Qwen3_5TextConfig`, `Qwen3_5MoeTextConfig`.
    """
    text, root = text_part(config)
    refuse_unsupported(text)
    linear = read_linear_attention(text)
    usual: dict[str, Any] = {"head_dim": 256, "partial_rotary_factor": 0.25}
    routed: dict[str, Any] = {}
    if "_moe" in str(config["model_type"]):
        routed = read_experts(text) | {"shared_gate": True}
        routed["shared_ffn"] = integer(text, "shared_expert_intermediate_size")
        # No layer is dense, so nothing has the size that the others call intermediate_size.
        usual["intermediate_size"] = routed["expert_ffn"]
    return base_dims(
        {**usual, **text},
        qk_norm=True,
        attention_gate=True,
        norm_offset=True,
        linear=linear,
        mtp_layers=read_mtp_layers(text, linear, 0),
        root=root,
        **routed,
    )


_CLASSES = {"Router": "Qwen3_5MoeTopKRouter"}
_WHOLE = Release(NESTED_ROOT, nested=True, drafts=qwen_drafts, linears_outside=qwen_vision, classes=_CLASSES)


def _family(model_type: str, release: Release, language_models: Mapping[str, str]) -> ModelFamily:
    return ModelFamily(
        (model_type,),
        (
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5ForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5TextForCausalLM",
            "Qwen3_5MoeTextForCausalLM",
        ),
        read_dims,
        partial(linear_model, by_key_head=False),
        {"slime": partial(linear_model, by_key_head=False, slime=True)},
        passthrough=("model.visual.",),
        language_models=language_models,
        release=release,
    )


# transformers loads a separate language model under both spellings (its conversion mapping of `qwen3_5_text`).
FAMILIES = tuple(
    family
    for whole, text in (("qwen3_5", "qwen3_5_text"), ("qwen3_5_moe", "qwen3_5_moe_text"))
    for family in (
        _family(whole, replace(_WHOLE, model_type=text), {}),
        _family(text, Release(drafts=qwen_drafts, classes=_CLASSES), {text: whole}),
    )
)
