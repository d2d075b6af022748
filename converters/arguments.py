"""The Megatron-LM arguments that a model's dimensions amount to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptkit.errors import CkptkitError
from converters.dims import ModelDims


def megatron_args(dims: ModelDims) -> dict[str, Any]:
    """Megatron-LM arguments (argparse names) of this model, as a training run of it would have stored them.

    Only plain values, so that the restricted loaders of every Megatron version accept them. Raises CkptkitError for a model
    whose arguments Megatron has no words for, such as a rope scaling that it does not know.
    """
    args: dict[str, Any] = {
        "num_layers": dims.layers,
        "hidden_size": dims.hidden,
        "ffn_hidden_size": dims.ffn,
        "num_attention_heads": dims.heads,
        "group_query_attention": dims.groups != dims.heads,
        "num_query_groups": dims.groups,
        "kv_channels": dims.head_dim,
        "max_position_embeddings": dims.max_positions,
        "seq_length": dims.max_positions,
        "position_embedding_type": "rope",
        "add_position_embedding": True,
        "use_rotary_position_embeddings": True,
        "rotary_base": _whole(dims.rope_theta),
        "rotary_percent": dims.rotary_fraction,
        "rotary_interleaved": dims.rope_interleaved,
        "normalization": "RMSNorm",
        "norm_epsilon": dims.norm_eps,
        "apply_layernorm_1p": dims.norm_offset,
        "swiglu": dims.activation == "silu",
        "add_bias_linear": False,
        "add_qkv_bias": dims.qkv_bias,
        "qk_layernorm": dims.qk_norm,
        "untie_embeddings_and_output_weights": not dims.tied,
        "vocab_size": dims.vocab,
        "padded_vocab_size": dims.vocab,
        "init_method_std": dims.initializer_range,
        "tokenizer_type": "HuggingFaceTokenizer",
        "num_experts": dims.experts or None,
        "mtp_num_layers": dims.mtp_layers or None,
    }
    args |= _rope_args(dims)
    args |= _moe_args(dims) if dims.experts else {}
    return args


def comparable_args(dims: ModelDims) -> dict[str, Any]:
    """As `megatron_args`, but a rope scaling that has no arguments is left out: for holding two models against one another."""
    try:
        return megatron_args(dims)
    except CkptkitError:
        return megatron_args(replace(dims, rope_scaling=None))


def _whole(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


def _rope_args(dims: ModelDims) -> dict[str, Any]:
    """Rope scaling. Megatron's `--use-rope-scaling` is that of Llama 3 with three of its four numbers fixed (`rotary_pos_embedding.py`)."""
    if dims.rope_scaling is None:
        return {}
    kind = dims.rope_scaling["rope_type"]
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind == "llama3" and all(dims.rope_scaling.get(key) == value for key, value in fixed.items()):
        return {"use_rope_scaling": True, "rope_scaling_factor": float(dims.rope_scaling["factor"])}
    raise CkptkitError(
        f"config.json: rope scaling {kind!r} as it stands there has no Megatron arguments",
        "training would run another model than this one; remove the scaling if it is only for longer contexts than you train with",
    )


def _moe_args(dims: ModelDims) -> dict[str, Any]:
    return {
        "moe_layer_freq": [int(layer in dims.moe) for layer in range(dims.layers)],
        "moe_ffn_hidden_size": dims.expert_ffn,
        "moe_shared_expert_intermediate_size": dims.shared_ffn or None,
        "moe_shared_expert_gate": dims.shared_gate,
        "moe_router_topk": dims.top_k,
        "moe_router_score_function": "sigmoid" if dims.router_sigmoid else "softmax",
        "moe_router_pre_softmax": not dims.router_normalize or dims.router_sigmoid,
        "moe_router_enable_expert_bias": dims.router_bias,
        "moe_router_topk_scaling_factor": dims.router_scale,
        "moe_router_num_groups": dims.router_groups,
        "moe_router_group_topk": dims.router_top_groups,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": True,
    }
