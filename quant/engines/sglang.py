"""SGLang's classes of models, by `model_type`, as 0.5.16 to 0.5.23 have them.

Source: `sglang/srt/models/*.py` of SGLang 0.5.16. A fact that another release does not share depends on the release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.converters.blocks.sigmoid_moe import dense_layers
from ckptkit.converters.config.values import NESTED_ROOT, integer, rope_of
from ckptkit.converters.families import exaone_moe, minimax_m2, nemotron_h, qwen3_next
from ckptkit.core.installation import package_release
from ckptkit.quant.engines.facts import QKV_GATE_UP, Dense, EngineClass


def _exaone_keys(text: Mapping[str, Any]) -> dict[str, Any]:
    dense = exaone_moe.dense_layers(text)
    return {"is_moe_layer": [layer not in dense for layer in range(integer(text, "num_hidden_layers"))]}


def _dense_keys(text: Mapping[str, Any]) -> dict[str, Any]:
    return {"first_k_dense_replace": len(dense_layers(text, (0,)))}


def _gpt_oss_keys(text: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang has a default from 0.5.23 on (`gpt_oss.py`)."""
    return {} if package_release("sglang") >= (0, 5, 23) else {"swiglu_limit": 7.0}


def _granite_keys(text: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's config class uses 10000 if `rope_theta` is absent, and turns no other dimension."""
    theta = rope_of(text)["rope_theta"]
    return {"rope_theta": theta} if text.get("position_embedding_type") == "rope" and theta != 10000 else {}


def _minimax_keys(text: Mapping[str, Any]) -> dict[str, Any]:
    """Without the three last, SGLang builds no norms of q and k, no bias of the router, and turns complete heads."""
    dims = minimax_m2.read_dims(text)
    rotary = round(dims.rotary_fraction * dims.head_dim)
    return {"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True, "rotary_dim": rotary}


def _nemotron_keys(text: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's config class has another name for the groups of mixers, with a default of 8."""
    mamba = nemotron_h.read_dims(text).mamba
    return {} if mamba is None or mamba.groups == 8 else {"mamba_n_groups": mamba.groups}


def _linear_keys(text: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang counts the layers with softmax attention by their interval; it reads no `layer_types`."""
    linear = set(qwen3_next.read_linear_attention(text).layers)
    first = (layer for layer in range(integer(text, "num_hidden_layers")) if layer not in linear)
    return {"full_attention_interval": next(first, len(linear)) + 1}


# `DeepseekV2AttentionMLA`, and its blocks with a shared expert, read `.weight` of these layers, which INT4 layers do
# not have.
_LATENT = (
    Dense(r".*\.self_attn\..*", "SGLang's latent attention reads the dense weight"),
    Dense(r".*\.shared_experts\..*", "SGLang reads the dense weight of the shared expert"),
)
# `Qwen3NextGatedDeltaNet` and Qwen3.5's have special loaders for dense parts.
_LINEAR = (Dense(r".*\.linear_attn\..*", "SGLang reshards the dense projections of linear attention"),)
_DEEPSEEK = EngineClass(
    ("fused_qkv_a_proj_with_mqa",),
    dense=_LATENT,
    keys=lambda text: {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
)
_TENSOR_SCALES = EngineClass(fp8_blocks=False)
_WRAPPED = ("language_model.model.", "model.")
_QWEN_VL_ENTRIES = (
    (NESTED_ROOT, "language_model.model."),
    ("model.visual.", "visual."),
    ("lm_head.", "language_model.lm_head."),
    ("model.", "language_model.model."),
)
_QWEN3_5 = EngineClass((*QKV_GATE_UP, "in_proj_qkvz", "in_proj_ba"), dense=_LINEAR, keys=_linear_keys)
_GEMMA4 = EngineClass(QKV_GATE_UP, inside=(("experts", "moe.experts"),), partly_fused=True)
# Each layer of Gemma 4's vision tower clips its inputs and outputs; SGLang's joined layers do so themselves.
_GEMMA4_TOWER = tuple((f".{name}_proj.linear", ".qkv_proj") for name in "qkv")
_GEMMA4_TOWER += tuple((f".{name}_proj.linear", ".gate_up_proj") for name in ("gate", "up"))
_DEEPSEEK_V4_PARTS = (
    *(("attn", "self_attn"), ("ffn", "mlp"), ("wq_a", "wqkv_a"), ("wkv", "wqkv_a")),
    *(("w1", "gate_up_proj"), ("w3", "gate_up_proj"), ("w2", "down_proj")),
)
_KIMI_ENTRIES = (("language_model.layers.", "language_model.model.layers."),)
_NEMOTRON_ROOT = ("backbone.", "model.")
_STEP = EngineClass(inside=(("moe", "mlp"),))

CLASSES: Mapping[str, EngineClass] = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2"), _DEEPSEEK),
    "deepseek_v4": EngineClass(root=("layers.", "model.layers."), inside=_DEEPSEEK_V4_PARTS, fp8_only=True),
    "ernie4_5_moe": EngineClass(QKV_GATE_UP),
    "exaone_moe": EngineClass(keys=_exaone_keys),
    "gemma3": EngineClass(QKV_GATE_UP, outside=((".self_attn.out_proj", ".self_attn.proj"),)),
    "gemma3_text": EngineClass(QKV_GATE_UP),
    "gemma4": replace(_GEMMA4, outside=_GEMMA4_TOWER),
    **dict.fromkeys(("gemma4_text", "gemma4_unified", "gemma4_unified_text"), _GEMMA4),
    "glm4_moe": EngineClass(joins_shared_expert=True),
    "glm4_moe_lite": EngineClass(dense=_LATENT, keys=_dense_keys),
    "gpt_oss": EngineClass(keys=_gpt_oss_keys),
    "granitemoehybrid": EngineClass(("qkv_proj",), inside=(("mamba", "mixer"),), keys=_granite_keys),
    "hy_v3": EngineClass(
        root=("model.", ".model."), keys=lambda text: {**_dense_keys(text), "qk_norm": True, "route_norm": True}
    ),
    "kimi_k25": replace(_DEEPSEEK, root=("language_model.", ""), entries=_KIMI_ENTRIES),
    **dict.fromkeys(("llama", "ministral3", "mistral", "phi3"), _TENSOR_SCALES),
    "minimax_m2": EngineClass(QKV_GATE_UP, keys=_minimax_keys),
    # It joins the indexer's projections as a separate layer.
    "minimax_m3_vl": EngineClass(
        inside=(("block_sparse_moe", "mlp"), *((f"index_{one}_proj", "index_qkv_proj") for one in "qk"))
    ),
    "mistral3": replace(_TENSOR_SCALES, root=_WRAPPED, outside=((".attention.o_proj", ".attention.proj"),)),
    "mixtral": EngineClass(root=("model.", "")),
    "nemotron_h": EngineClass(("qkv_proj",), root=_NEMOTRON_ROOT, entries=(_NEMOTRON_ROOT,), keys=_nemotron_keys),
    "qwen2_5_vl": EngineClass(("gate_up_proj",), entries=_QWEN_VL_ENTRIES, outside=((".attn.qkv", ".attn.qkv_proj"),)),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"), _QWEN3_5),
    "qwen3_moe": EngineClass(QKV_GATE_UP),
    "qwen3_next": EngineClass(QKV_GATE_UP, dense=_LINEAR, keys=_linear_keys),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), EngineClass(entries=_QWEN_VL_ENTRIES)),
    "step3p5": _STEP,
    # It looks for the names of releases in NVFP4.
    "step3p7": replace(
        _STEP,
        root=_WRAPPED[::-1],
        entries=(
            ("model.language_model.", "language_model.model."),
            *((f"model.{tower}", tower) for tower in ("vision_model", "vit_large_projector")),
        ),
    ),
}
