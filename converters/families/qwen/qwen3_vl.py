"""Qwen3-VL, dense and MoE: the language part is that of Qwen3, the vision tower is carried along.

Multimodal rotary embedding is the plain one wherever there is only text, since all three axes of a text token's
position are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptkit.core.errors import CkptkitError
from converters.blocks.decoder import attention, dense_mlp, embeddings, moe_mlp
from converters.blocks.vision import qwen_vision
from converters.config.dims import ModelDims, base_dims, layers_without_experts
from converters.config.tie import TieFlag
from converters.config.values import NESTED_ROOT, flag, integer, require_flags, text_part
from converters.family import EngineClass, FusedExperts, ModelFamily, Release
from converters.rules import ParamMapping


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a qwen3_vl or qwen3_vl_moe config. Source: transformers `Qwen3VLTextConfig`, `Qwen3VLMoeTextConfig`."""
    text, root = text_part(config)
    require_flags(text, config["model_type"], {"attention_bias": False})
    if not flag(text, "norm_topk_prob", True):
        raise CkptkitError(
            "config.json: qwen3_vl_moe with norm_topk_prob false is not supported",
            "transformers' router always normalizes",
            code="unsupported",
        )
    routed: dict[str, Any] = {}
    if config["model_type"] == "qwen3_vl_moe":
        routed = {
            "experts": integer(text, "num_experts" if text.get("num_experts") is not None else "num_local_experts"),
            "top_k": integer(text, "num_experts_per_tok"),
            "expert_ffn": integer(text, "moe_intermediate_size"),
            "dense_layers": layers_without_experts(text),
        }
    return base_dims(text, qkv_bias=False, qk_norm=True, default_theta=500000.0, root=root, **routed)


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of the language part."""
    return (*embeddings(dims), *attention(dims), *dense_mlp(dims), *(moe_mlp(dims) if dims.experts else ()))


def _linears_outside(config: Mapping[str, Any]) -> Iterator[str]:
    """The Linear layers of the vision tower, which has a merger for every layer that it also hands on."""
    indexes = config["vision_config"].get("deepstack_visual_indexes")
    return qwen_vision(config, mergers=3 if indexes is None else len(indexes))


_RELEASE = Release(NESTED_ROOT, nested=True, linears_outside=_linears_outside, model_type="qwen3_vl_text")
_DENSE = ModelFamily(
    ("qwen3_vl",),
    ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
    read_dims,
    mappings,
    carried=("model.visual.",),
    tie=TieFlag(older=("transformers 4",)),
    fused=FusedExperts(transposed=True),
    release=_RELEASE,
    engines={
        "sglang": EngineClass(
            entries=(
                (NESTED_ROOT, "language_model.model."),
                ("model.visual.", "visual."),
                ("lm_head.", "language_model.lm_head."),
                ("model.", "language_model.model."),
            )
        ),
        "vllm": EngineClass(adapters_of_text=False),
    },
)
_CLASSES = {"Router": "Qwen3VLMoeTextTopKRouter"}
FAMILIES = (
    _DENSE,
    replace(
        _DENSE,
        model_types=("qwen3_vl_moe",),
        architectures=_DENSE.architectures[::-1],
        release=replace(_RELEASE, model_type="qwen3_vl_moe_text", classes=_CLASSES),
        engines={**_DENSE.engines, "vllm": EngineClass(packs_routers=True, adapters_of_text=False)},
    ),
)
