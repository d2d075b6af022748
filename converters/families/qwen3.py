"""Qwen3, dense and MoE, and the language models of Qwen3-VL and Qwen3-Omni: q/k norms, no biases, no shared expert.

Other parts (towers, talker, vocoder) are passed through. Multimodal rotary embedding equals the plain one for text,
since all three axes of a text token's position are the same; `interleaved` in its settings is the order of the axes,
not a rotation in pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptkit.converters.blocks.decoder import attention, dense_mlp, embeddings, moe_mlp
from ckptkit.converters.config.dims import ModelDims, base_dims, layers_without_experts, read_experts
from ckptkit.converters.config.values import NESTED_ROOT, flag, integer, require, text_part, without_windows
from ckptkit.converters.family import FusedExperts, ModelFamily, Release
from ckptkit.converters.rules import ParamMapping
from ckptkit.core.errors import CkptkitError

_THINKER = "thinker."  # prefix of Qwen3-Omni's thinker in the complete model


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a qwen3 config. Source: transformers `Qwen3Config` (the default head size is 128)."""
    without_windows(config)
    require(config, "qwen3", {"attention_bias": False}, "Megatron has no bias on o_proj without biases in the MLP")
    return base_dims({**config, "head_dim": integer(config, "head_dim", 128)}, qk_norm=True)


def _experts(text: Mapping[str, Any]) -> dict[str, Any]:
    count = "num_experts" if text.get("num_experts") is not None else "num_local_experts"
    return {**read_experts(text, count), "dense_layers": layers_without_experts(text)}


def read_moe_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a qwen3_moe config. Source: transformers `Qwen3MoeConfig`."""
    without_windows(config)
    require(config, "qwen3_moe", {"attention_bias": False})
    return base_dims(config, qk_norm=True, router_normalize=flag(config, "norm_topk_prob", False), **_experts(config))


def read_vl_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a qwen3_vl or qwen3_vl_moe config. Source: transformers `Qwen3VLTextConfig`, `Qwen3VLMoeTextConfig`."""
    text, root = text_part(config)
    # transformers' router always normalizes.
    require(text, config["model_type"], {"attention_bias": False, "norm_topk_prob": True})
    routed = _experts(text) if config["model_type"] == "qwen3_vl_moe" else {}
    return base_dims(text, qk_norm=True, default_theta=500000.0, root=root, **routed)


def read_omni_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of Qwen3-Omni's. Source: transformers `Qwen3OmniMoeThinkerConfig`, `Qwen3OmniMoeTextConfig`."""
    whole = config["model_type"] == "qwen3_omni_moe"
    thinker = config.get("thinker_config") if whole else config
    if not isinstance(thinker, Mapping):
        raise CkptkitError("config.json: qwen3_omni_moe has no thinker_config", "restore it from the release")
    text, _ = text_part({**thinker, "model_type": config["model_type"]})
    require(text, config["model_type"], {"attention_bias": False, "sliding_window": None})
    before = _THINKER if whole else ""
    return base_dims(
        text,
        qk_norm=True,
        default_theta=1e6,
        root=f"{before}model.",
        head=f"{before}lm_head.weight",
        router_normalize=flag(text, "norm_topk_prob", True),
        **_experts(text),
    )


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    return (*embeddings(dims), *attention(dims), *dense_mlp(dims), *(moe_mlp(dims) if dims.experts else ()))


def qwen_vision(config: Mapping[str, Any], mergers: int = 0) -> Iterator[str]:
    """The Linear layers of the vision tower of Qwen3-VL and Qwen3.5, with this many further mergers.

    Source: transformers `Qwen3VLVisionModel`.
    """
    root, parts = "model.visual.", ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
    for block in range(integer(config["vision_config"], "depth", 27)):
        yield from (f"{root}blocks.{block}.{part}" for part in parts)
    for merger in ("merger", *(f"deepstack_merger_list.{number}" for number in range(mergers))):
        yield from (f"{root}{merger}.{name}" for name in ("linear_fc1", "linear_fc2"))


def _linears_outside(config: Mapping[str, Any]) -> Iterator[str]:
    """The Linear layers of Qwen3-VL's vision tower, with a merger for every layer in `deepstack_visual_indexes`."""
    indexes = config["vision_config"].get("deepstack_visual_indexes")
    return qwen_vision(config, mergers=3 if indexes is None else len(indexes))


_VL_RELEASE = Release(NESTED_ROOT, nested=True, linears_outside=_linears_outside, model_type="qwen3_vl_text")
_VL = ModelFamily(
    ("qwen3_vl",),
    ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
    read_vl_dims,
    mappings,
    passthrough=("model.visual.",),
    fused=FusedExperts(transposed=True),
    release=_VL_RELEASE,
)
_TOWERS = ("audio_tower.", "visual.")
_OMNI = ModelFamily(
    ("qwen3_omni_moe_thinker",),
    ("Qwen3OmniMoeThinkerForConditionalGeneration",),
    read_omni_dims,
    mappings,
    passthrough=_TOWERS,
    release=None,  # no INT4: the Linear layers of towers and talker are not listed
)
FAMILIES = (
    ModelFamily(("qwen3",), ("Qwen3ForCausalLM",), read_dims, mappings),
    ModelFamily(
        ("qwen3_moe",),
        ("Qwen3MoeForCausalLM",),
        read_moe_dims,
        mappings,
        release=Release(classes={"Router": "Qwen3MoeTopKRouter"}),
    ),
    _VL,
    replace(
        _VL,
        model_types=("qwen3_vl_moe",),
        architectures=_VL.architectures[::-1],
        release=replace(_VL_RELEASE, model_type="qwen3_vl_moe_text", classes={"Router": "Qwen3VLMoeTextTopKRouter"}),
    ),
    _OMNI,
    replace(
        _OMNI,
        model_types=("qwen3_omni_moe",),
        architectures=("Qwen3OmniMoeForConditionalGeneration",),
        passthrough=(*(f"{_THINKER}{tower}" for tower in _TOWERS), "talker.", "code2wav."),
    ),
)
