"""The Megatron-LM arguments that a model's dimensions amount to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from converters.blocks.indexer import indexer_args
from converters.blocks.latent_attention import mla_args
from converters.blocks.linear_attention import delta_net_args
from converters.config.dims import ModelDims
from converters.config.values import flag, integer, number


def megatron_args(dims: ModelDims, dialect: str = "mcore") -> dict[str, Any]:
    """Megatron-LM arguments (argparse names) of this model, as a training run of it would have stored them.

    Only plain values, so that the restricted loaders of every Megatron version accept them. In a `dialect` other than
    megatron-core's, linear and sparse attention have none: slime's modules take their sizes from the HF config. Raises
    CkptkitError for a model whose arguments Megatron has no words for, such as a rope scaling that it does not know.
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
        "squared_relu": False,
        "apply_query_key_layer_scaling": False,
        # Megatron's own default is 0.1.
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # One switch for attention and MLP; families refuse a model with biases in only one of them.
        "add_bias_linear": dims.mlp_bias,
        "add_qkv_bias": dims.qkv_bias,
        "qk_layernorm": dims.qk_norm,
        "untie_embeddings_and_output_weights": not dims.tied,
        "vocab_size": dims.vocab,
        "padded_vocab_size": dims.vocab,
        "init_method_std": dims.initializer_range,
        "tokenizer_type": "HuggingFaceTokenizer",
        "num_experts": dims.experts or None,
        "mtp_num_layers": dims.mtp_layers or None,
        "q_lora_rank": None,  # slime's exporter reads it for every model
    }
    args |= mla_args(dims) if dims.mla else _rope_args(dims)
    args |= _window_args(dims)
    args |= _layer_args(dims)
    args |= delta_net_args(dims.linear, dims.layers) if dims.linear and dialect == "mcore" else {}
    args |= indexer_args(dims.indexer) if dims.indexer and dialect == "mcore" else {}
    args |= _moe_args(dims) if dims.experts else {}
    return args


def comparable_args(dims: ModelDims) -> dict[str, Any]:
    """As `megatron_args`, but leaves out a rope scaling that has no arguments: for comparing two models."""
    try:
        return megatron_args(dims)
    except CkptkitError:
        return megatron_args(replace(dims, rope_scaling=None))


def _whole(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


def _rope_args(dims: ModelDims) -> dict[str, Any]:
    """Rope scaling of Llama 3, YaRN or linear.

    Source: megatron-core `rotary_pos_embedding.py`, which fixes three of Llama 3's four numbers.
    """
    if dims.rope_scaling is None:
        return {}
    kind = dims.rope_scaling["rope_type"]
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind == "llama3" and all(dims.rope_scaling.get(key) == value for key, value in fixed.items()):
        return {"use_rope_scaling": True, "rope_scaling_factor": number(dims.rope_scaling, "factor")}
    if kind == "yarn" and _plain_yarn(dims):
        return _yarn_args(dims.rope_scaling)
    if kind == "linear" and dims.local_rope_theta is not None:
        return {}  # scaled in some layers only: Megatron-LM has no word for it, Megatron-Bridge's model provider has
    if kind == "linear" and number(dims.rope_scaling, "factor").is_integer():
        return {"rotary_seq_len_interpolation_factor": int(number(dims.rope_scaling, "factor"))}
    hint = "remove the scaling if it is only for longer contexts than you train with"
    raise CkptkitError(
        f"config.json: rope scaling {shortened(kind)} as it stands there has no Megatron arguments",
        f"training would run another model than this one; {hint}",
    )


def _plain_yarn(dims: ModelDims) -> bool:
    """Whether Megatron computes this YaRN: over whole heads, from a stated length, with the usual attention factor.

    Readers differ on the length where it is absent.
    """
    rope = dims.rope_scaling or {}
    return (
        dims.rotary_fraction == 1
        and rope.get("original_max_position_embeddings") is not None
        and rope.get("attention_factor") is None
    )


def _yarn_args(rope: Mapping[str, Any]) -> dict[str, Any]:
    """YaRN, for which Megatron-LM has arguments from 0.19 on; before, only Megatron-Bridge's model provider can say it.

    Source: Megatron-LM 0.19 `_apply_yarn_config_from_args`.
    """
    # transformers takes these two only together; 1 and 0 are Megatron's way to say neither.
    scales = (number(rope, "mscale", 0.0), number(rope, "mscale_all_dim", 0.0))
    mscale, mscale_all_dim = scales if all(scales) else (1.0, 0.0)
    return {
        "position_embedding_type": "yarn",
        "use_rotary_position_embeddings": False,
        "rotary_scaling_factor": number(rope, "factor"),
        "yarn_original_max_position_embeddings": integer(rope, "original_max_position_embeddings"),
        "yarn_beta_fast": number(rope, "beta_fast", 32.0),
        "yarn_beta_slow": number(rope, "beta_slow", 1.0),
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
        "yarn_correction_range_round_to_int": flag(rope, "truncate", True),
    }


def _layer_args(dims: ModelDims) -> dict[str, Any]:
    """What few models have inside a layer; only what departs from Megatron's default."""
    args: dict[str, Any] = {}
    if dims.activation == "quick_geglu":
        args |= {"quick_geglu": True, "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0}
    if dims.attention_gate:
        args["attention_output_gate"] = True
    if dims.sinks:
        args["softmax_type"] = "learnable"
    if dims.sandwich == "layer":
        args |= {"post_self_attn_layernorm": True, "post_mlp_layernorm": True}
    return args


def _window_args(dims: ModelDims) -> dict[str, Any]:
    """Sliding windows. Megatron counts the tokens before and after a query's own, an HF config counts its own too."""
    if dims.window is None:
        return {}
    pattern = [int(layer in dims.window_layers) for layer in range(dims.layers)]
    # None: every layer.
    return {"window_size": (dims.window - 1, 0), "window_attn_skip_freq": None if all(pattern) else pattern}


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
