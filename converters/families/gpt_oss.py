"""GPT-OSS (20B, 120B).

Every layer routed, with biases everywhere, attention sinks, every other layer with a sliding window, YaRN.

Experts are fused and transposed, with gate and up interleaved; the HF names below with an expert's number are those of
`converters/experts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.converters.blocks.decoder import attention, embeddings, gated_mlp
from ckptkit.converters.config.dims import ModelDims, base_dims, read_experts
from ckptkit.converters.config.values import require, sliding_layers, window_of
from ckptkit.converters.family import FusedExperts, ModelFamily
from ckptkit.converters.ops.basic import Copy, GateUp
from ckptkit.converters.rules import ParamMapping, decoder

# transformers' default for a config without rope settings.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a gpt_oss config.

    Source: transformers `GptOssConfig`, `GptOssAttention`, `GptOssExperts` (which fixes the clamp).
    """
    require(
        config, "gpt_oss", {"attention_bias": True}, "Megatron has one switch for the biases of attention and experts"
    )
    require(config, "gpt_oss", {"swiglu_limit": 7.0}, "transformers always clamps at 7.0")
    has_rope = config.get("rope_parameters") or config.get("rope_scaling")
    dims = base_dims(
        config if has_rope else {**config, "rope_scaling": _YARN},
        qkv_bias=True,
        default_theta=150000.0,
        out_bias=True,
        mlp_bias=True,
        sinks=True,
        window=window_of(config, absent=128),
        **read_experts(config, "num_local_experts", "intermediate_size"),
    )
    # hidden_act is silu, but the gate is x sigmoid(1.702 x).
    return replace(
        dims, activation="quick_geglu", window_layers=() if dims.window is None else sliding_layers(config, 2)
    )


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    at, hidden, ffn = decoder(dims, dims.all_layers), dims.hidden, dims.expert_ffn
    megatron, hf = "mlp.experts.experts.{expert}.", "mlp.experts.{expert}."
    return (
        *embeddings(dims),
        *attention(dims),
        at.rule("self_attention.core_attention.softmax_offset", {"self_attn.sinks": (dims.heads,)}, Copy(0)),
        at.rule("pre_mlp_layernorm.weight", {"post_attention_layernorm.weight": (hidden,)}),
        at.rule("mlp.router.weight", {"mlp.router.weight": (dims.experts, hidden)}, kind="Router"),
        at.rule("mlp.router.bias", {"mlp.router.bias": (dims.experts,)}),
        *gated_mlp(at, megatron, hf, hidden, ffn),
        at.rule(megatron + "linear_fc1.bias", {hf + "gate_proj.bias": (ffn,), hf + "up_proj.bias": (ffn,)}, GateUp()),
        at.rule(megatron + "linear_fc2.bias", {hf + "down_proj.bias": (hidden,)}),
    )


FAMILIES = (
    ModelFamily(
        ("gpt_oss",),
        ("GptOssForCausalLM",),
        read_dims,
        mappings,
        fused=FusedExperts(transposed=True, interleaved=True, is_required=True),
        release=None,
    ),
)
