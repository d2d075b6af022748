"""Qwen3.5 and Qwen3.6, dense and MoE.

As Qwen3-Next, with linear attention's input projection in four tensors and a vision tower.

The vision tower is carried along. Its multimodal rotary embedding is the plain one wherever there is only text, since
all three axes of a text token's position are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from converters.blocks.decoder import attention, dense_mlp, embeddings, moe_mlp
from converters.blocks.linear_attention import (
    SGLANG_DENSE,
    gated_delta_net,
    hf_linear_attention,
    qwen_drafts,
    qwen_mtp,
    read_linear_attention,
    read_mtp_layers,
    refuse_unsupported,
    sglang_keys,
)
from converters.blocks.vision import qwen_vision
from converters.config.dims import ModelDims, base_dims
from converters.config.tie import TieFlag
from converters.config.values import NESTED_ROOT, integer, text_part
from converters.family import QKV_GATE_UP, EngineClass, ModelFamily, Release
from converters.rules import ParamMapping


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a qwen3_5 or qwen3_5_moe config, or of its text part alone.

    Source: transformers `Qwen3_5TextConfig`, `Qwen3_5MoeTextConfig`.

    `mtp_num_hidden_layers` says whether there is an MTP layer.
    """
    text, root = text_part(config)
    refuse_unsupported(text)
    linear = read_linear_attention(text)
    usual: dict[str, Any] = {"head_dim": 256, "partial_rotary_factor": 0.25}
    routed: dict[str, Any] = {}
    if "_moe" in str(config["model_type"]):
        ffn = integer(text, "moe_intermediate_size")
        # No layer is dense, so nothing has the size that the others call intermediate_size.
        usual["intermediate_size"] = ffn
        routed = {
            "experts": integer(text, "num_experts"),
            "top_k": integer(text, "num_experts_per_tok"),
            "expert_ffn": ffn,
            "shared_ffn": integer(text, "shared_expert_intermediate_size"),
            "shared_gate": True,
        }
    return base_dims(
        {**usual, **text},
        qkv_bias=False,
        qk_norm=True,
        attention_gate=True,
        norm_offset=True,
        linear=linear,
        mtp_layers=read_mtp_layers(text, linear, 0),
        root=root,
        **routed,
    )


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of a qwen3_5 or qwen3_5_moe model."""
    return (*gated_delta_net(dims, by_key_head=False), *_all_but_linear_attention(dims))


def slime_mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of such a model in slime, whose linear attention is the HF module."""
    return (*hf_linear_attention(dims, by_key_head=False), *_all_but_linear_attention(dims))


def _all_but_linear_attention(dims: ModelDims) -> tuple[ParamMapping, ...]:
    rules = [
        *embeddings(dims),
        *attention(dims),
        *(moe_mlp(dims, "shared_expert") if dims.experts else dense_mlp(dims)),
    ]
    if dims.mtp_layers:
        layer, around = qwen_mtp(dims)
        mlp = moe_mlp(dims, "shared_expert", layer) if dims.experts else dense_mlp(dims, layer)
        rules += [*around, *attention(dims, layer), *mlp]
    return tuple(rules)


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
        mappings,
        {"slime": slime_mappings},
        carried=("model.visual.",),
        tie=TieFlag(("transformers", "SGLang"), ("vLLM",)),
        language_models=language_models,
        release=release,
        engines={
            "sglang": EngineClass((*QKV_GATE_UP, "in_proj_qkvz", "in_proj_ba"), dense=SGLANG_DENSE, keys=sglang_keys),
            "vllm": EngineClass(adapters_of_text=False),
        },
    )


# transformers loads the language model alone under either spelling (its conversion mapping of `qwen3_5_text`).
FAMILIES = tuple(
    family
    for whole, text in (("qwen3_5", "qwen3_5_text"), ("qwen3_5_moe", "qwen3_5_moe_text"))
    for family in (
        _family(whole, replace(_WHOLE, model_type=text), {}),
        _family(text, Release(drafts=qwen_drafts, classes=_CLASSES), {text: whole}),
    )
)
