"""Qwen3-Omni: the thinker's language model is that of Qwen3 MoE. All beside it (towers, talker, vocoder) is carried.

Multimodal rotary embedding is the plain one wherever there is only text. `interleaved` in its settings says how the
three axes take turns, not that dimensions turn in pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.core.errors import CkptkitError
from converters.blocks.decoder import attention, dense_mlp, embeddings, moe_mlp
from converters.config.dims import ModelDims, base_dims, layers_without_experts
from converters.config.values import flag, integer, require_flags, text_part
from converters.family import ModelFamily
from converters.rules import ParamMapping

_THINKER = "thinker."  # before all names of the thinker in the whole model


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of the language model. Source: transformers `Qwen3OmniMoeThinkerConfig`, `Qwen3OmniMoeTextConfig`."""
    whole = config["model_type"] == "qwen3_omni_moe"
    thinker = config.get("thinker_config") if whole else config
    if not isinstance(thinker, Mapping):
        raise CkptkitError("config.json: qwen3_omni_moe without a thinker_config", "restore it from the release")
    text, _ = text_part({**thinker, "model_type": config["model_type"]})
    require_flags(text, config["model_type"], {"attention_bias": False})
    if text.get("sliding_window") is not None:
        raise CkptkitError(
            "config.json: qwen3_omni_moe with sliding_window is not supported",
            "no released model uses it",
            code="unsupported",
        )
    before = _THINKER if whole else ""
    return base_dims(
        text,
        qkv_bias=False,
        qk_norm=True,
        default_theta=1e6,
        root=f"{before}model.",
        head=f"{before}lm_head.weight",
        experts=integer(text, "num_experts"),
        top_k=integer(text, "num_experts_per_tok"),
        expert_ffn=integer(text, "moe_intermediate_size"),
        dense_layers=layers_without_experts(text),
        router_normalize=flag(text, "norm_topk_prob", True),
    )


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of the thinker's language model."""
    return (*embeddings(dims), *attention(dims), *dense_mlp(dims), *moe_mlp(dims))


_TOWERS = ("audio_tower.", "visual.")
_ALONE = ModelFamily(
    ("qwen3_omni_moe_thinker",),
    ("Qwen3OmniMoeThinkerForConditionalGeneration",),
    read_dims,
    mappings,
    carried=_TOWERS,
    release=None,  # no INT4: the Linear layers of towers and talker are not listed
)
FAMILIES = (
    _ALONE,
    replace(
        _ALONE,
        model_types=("qwen3_omni_moe",),
        architectures=("Qwen3OmniMoeForConditionalGeneration",),
        carried=(*(f"{_THINKER}{tower}" for tower in _TOWERS), "talker.", "code2wav."),
    ),
)
