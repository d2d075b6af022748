"""DeepSeek V3 and R1, Moonlight, Kimi K2, and Kimi K2.5, which is a Kimi K2 with a vision tower and its projector.

Latent attention, first layers dense, experts selected by groups, one MTP layer in DeepSeek's models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.converters.blocks.decoder import ROTARY_FREQUENCIES, appended_drafts, moe_model, shared_experts_mlp
from ckptkit.converters.blocks.latent_attention import mla_attention, read_mla
from ckptkit.converters.blocks.sigmoid_moe import read_sigmoid_moe
from ckptkit.converters.config.dims import ModelDims, base_dims, first_layers
from ckptkit.converters.config.values import flag, integer, text_config_of, text_part
from ckptkit.converters.family import ModelFamily, Release
from ckptkit.converters.rules import ParamMapping


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a deepseek_v3 or kimi_k2 config. Source: transformers `DeepseekV3Config`."""
    mla = read_mla(config)
    return base_dims(
        config,
        mla=mla,
        head_dim=mla.nope,
        dense_layers=first_layers(config, "first_k_dense_replace", integer(config, "first_k_dense_replace")),
        mtp_layers=integer(config, "num_nextn_predict_layers", 0),
        **read_sigmoid_moe(config, absent={}),
    )


def read_k25_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of the language model of a kimi_k25 config.

    Source: the `text_config` of its release, and SGLang's `kimi_k25.py`.
    """
    text = text_config_of(config, "kimi_k2", "deepseek_v3")
    part, _ = text_part(config)
    tied = flag(text, "tie_word_embeddings", False)
    return replace(read_dims(part), tied=tied, root=_K25_RELEASE.root, head=f"{_K25_RELEASE.head}.weight")


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of a model with latent attention and shared experts."""
    return moe_model(dims, mla_attention, shared_experts_mlp)


# Kimi K2 Thinking; its config.json has DeepSeek V3's model_type.
_IGNORE = frozenset(
    {"lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"}
)
# Kimi K2.5 and 2.6: the language model's entries only, and with those of the vision tower.
_K25_IGNORE = _IGNORE | {"re:vision_tower.*", "re:mm_projector.*"}
_RELEASE = Release(
    drafts=appended_drafts,
    published_ignore=(_IGNORE,),
    model_type="deepseek_v3",
    classes={"Router": "DeepseekV3TopkRouter"},
)
_K25_RELEASE = replace(
    _RELEASE,
    root="language_model.model.",
    head="language_model.lm_head",
    nested=True,
    older="language_model.layers.",  # nvidia/Kimi-K2.5-NVFP4; `hf_to_sglang_mapper` and `hf_to_vllm_mapper`
    published_ignore=(_IGNORE, _K25_IGNORE, _K25_IGNORE - {"lm_head"} | {"re:.*lm_head.*"}),
)
FAMILIES = (
    ModelFamily(
        ("deepseek_v3", "kimi_k2"),
        ("DeepseekV3ForCausalLM",),
        read_dims,
        mappings,
        passthrough_suffixes=ROTARY_FREQUENCIES,
        release=_RELEASE,
    ),
    ModelFamily(
        ("kimi_k25",),
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        read_k25_dims,
        mappings,
        passthrough=("vision_tower.", "mm_projector."),
        passthrough_suffixes=ROTARY_FREQUENCIES,
        release=_K25_RELEASE,
    ),
)
