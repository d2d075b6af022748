"""Compares Megatron's training arguments with an HF config, field by field; absent ones have Megatron's defaults."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from converters.blocks.latent_attention import WITHOUT_FLAG
from converters.config.dims import ModelDims
from converters.megatron.arguments import comparable_args

Args = Mapping[str, Any]


def hint_of(argument: str) -> str:
    """What to do where this argument belongs to another model."""
    if argument in WITHOUT_FLAG:
        set_it = "set the attribute on the arguments before the model is built"
        return f"Megatron-LM has no flag for it: {set_it}, or train with its default knowingly"
    return "this argument of the run that saved it belongs to another model: correct the launch script, or config.json"


def _get(args: Args, name: str, default: Any) -> Any:
    """An argument; None and absent both mean Megatron's default."""
    value = args.get(name)
    return default if value is None else value


def _groups(args: Args) -> Any:
    """Without --group-query-attention every head has its own keys and values, whatever num_query_groups says."""
    if not _get(args, "group_query_attention", False):
        return args.get("num_attention_heads")
    return _get(args, "num_query_groups", 1)


def _head_dim(args: Args) -> Any:
    if args.get("kv_channels") is not None:
        return args["kv_channels"]
    hidden, heads = args.get("hidden_size"), args.get("num_attention_heads")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None


def moe_layers(args: Args) -> Any:
    """1 for each layer with routed experts, else 0. `moe_layer_freq` is a number n (every n-th) or such a list."""
    layers, freq = args.get("num_layers"), _get(args, "moe_layer_freq", 1)
    if not _get(args, "num_experts", 0):
        return [0] * layers if isinstance(layers, int) else None
    if isinstance(freq, int) and isinstance(layers, int) and freq > 0:
        return [int(layer % freq == 0) for layer in range(layers)]
    return list(freq) if isinstance(freq, (list, tuple)) else freq


def linear_layers(args: Args) -> Any:
    """1 for each layer with linear attention, else 0.

    `linear_attention_freq` is a number n (all but every n-th) or such a list.
    """
    layers, freq = args.get("num_layers"), args.get("linear_attention_freq")
    if isinstance(freq, int) and isinstance(layers, int) and freq > 0:
        return [int((layer + 1) % freq != 0) for layer in range(layers)]
    return list(freq) if isinstance(freq, (list, tuple)) else freq


def windows(args: Args) -> Any:
    """1 for each layer with a sliding window, else 0.

    `window_attn_skip_freq` is a number n (all but every n-th), such a list, or None (all).
    """
    layers, freq = args.get("num_layers"), args.get("window_attn_skip_freq")
    if not args.get("window_size") or not isinstance(layers, int):
        return None
    if isinstance(freq, int) and freq > 0:
        return tuple(int((layer + 1) % freq != 0) for layer in range(layers))
    return (1,) * layers if freq is None else tuple(freq) if isinstance(freq, (list, tuple)) else freq


def _positions(args: Args) -> Any:
    # The older --use-rotary-position-embeddings means the same.
    return (
        "rope"
        if _get(args, "use_rotary_position_embeddings", False)
        else _get(args, "position_embedding_type", "learned_absolute")
    )


def _latent_rope(args: Args) -> Any:
    """Latent attention takes yarn by default, which with a factor of 1 is plain rotary embedding."""
    return "rope" if _get(args, "rotary_scaling_factor", 1.0) == 1 else _get(args, "rope_type", "yarn")


def _expert_ffn(args: Args) -> Any:
    return _get(args, "moe_ffn_hidden_size", args.get("ffn_hidden_size"))


# Argument -> how Megatron 0.13 to 0.19 would read it, defaults included (megatron/training/arguments.py).
_ALWAYS: dict[str, Callable[[Args], Any]] = {
    "num_layers": lambda args: args.get("num_layers"),
    "hidden_size": lambda args: args.get("hidden_size"),
    "num_attention_heads": lambda args: args.get("num_attention_heads"),
    "num_query_groups": _groups,
    "kv_channels": _head_dim,
    "rotary_base": lambda args: _get(args, "rotary_base", 10000),
    "rotary_percent": lambda args: _get(args, "rotary_percent", 1.0),
    "norm_epsilon": lambda args: _get(args, "norm_epsilon", _get(args, "layernorm_epsilon", 1e-5)),
    "qk_layernorm": lambda args: _get(args, "qk_layernorm", False),
    "add_qkv_bias": lambda args: _get(args, "add_qkv_bias", False) or _get(args, "add_bias_linear", True),
    "add_bias_linear": lambda args: _get(args, "add_bias_linear", True),
    "swiglu": lambda args: _get(args, "swiglu", False),
    "normalization": lambda args: _get(args, "normalization", "LayerNorm"),
    "position_embedding_type": _positions,
    "untie_embeddings_and_output_weights": lambda args: _get(args, "untie_embeddings_and_output_weights", False),
    "multi_latent_attention": lambda args: _get(args, "multi_latent_attention", False),
    "num_experts": lambda args: _get(args, "num_experts", 0),
    # Megatron stores None without --mtp-num-layers.
    "mtp_num_layers": lambda args: _get(args, "mtp_num_layers", 0),
}
_MOE: dict[str, Callable[[Args], Any]] = {
    "moe_layer_freq": moe_layers,
    "moe_ffn_hidden_size": _expert_ffn,
    "moe_shared_expert_intermediate_size": lambda args: _get(args, "moe_shared_expert_intermediate_size", 0),
    "moe_shared_expert_gate": lambda args: _get(args, "moe_shared_expert_gate", False),
    "moe_router_topk": lambda args: _get(args, "moe_router_topk", 2),
    "moe_router_score_function": lambda args: _get(args, "moe_router_score_function", "softmax"),
    "moe_router_enable_expert_bias": lambda args: _get(args, "moe_router_enable_expert_bias", False),
    "moe_router_topk_scaling_factor": lambda args: _get(args, "moe_router_topk_scaling_factor", 1.0),
    "moe_router_num_groups": lambda args: _get(args, "moe_router_num_groups", 1),
    "moe_router_group_topk": lambda args: _get(args, "moe_router_group_topk", 1),
}
# Softmax before or after top-k: a sigmoid router does not look at it.
_SOFTMAX: dict[str, Callable[[Args], Any]] = {
    "moe_router_pre_softmax": lambda args: _get(args, "moe_router_pre_softmax", False)
}
_DENSE: dict[str, Callable[[Args], Any]] = {"ffn_hidden_size": lambda args: args.get("ffn_hidden_size")}
_LATENT: dict[str, Callable[[Args], Any]] = {
    "q_lora_rank": lambda args: args.get("q_lora_rank"),
    "kv_lora_rank": lambda args: _get(args, "kv_lora_rank", 32),
    "qk_head_dim": lambda args: _get(args, "qk_head_dim", 128),
    "qk_pos_emb_head_dim": lambda args: _get(args, "qk_pos_emb_head_dim", 64),
    "v_head_dim": lambda args: _get(args, "v_head_dim", 128),
    "rope_type": _latent_rope,
    "rotary_scaling_factor": lambda args: _get(args, "rotary_scaling_factor", 1.0),
}
_YARN: dict[str, Callable[[Args], Any]] = {
    "mscale": lambda args: _get(args, "mscale", 1.0),
    "mscale_all_dim": lambda args: _get(args, "mscale_all_dim", 0.0),
    **{name: partial(_get, name=name, default=default) for name, default in WITHOUT_FLAG.items()},
}
# What latent attention never looks at.
_NOT_LATENT = ("num_query_groups", "kv_channels", "add_qkv_bias")


def _reader(name: str, default: Any) -> Callable[[Args], Any]:
    return lambda args: _get(args, name, default)


# What few models have inside a layer.
_LAYER: dict[str, Callable[[Args], Any]] = {
    "apply_layernorm_1p": _reader("apply_layernorm_1p", False),
    "rotary_interleaved": _reader("rotary_interleaved", False),
    "attention_output_gate": _reader("attention_output_gate", False),
    "quick_geglu": _reader("quick_geglu", False),
    "glu_linear_offset": _reader("glu_linear_offset", 0.0),
    "activation_func_clamp_value": _reader("activation_func_clamp_value", None),
    "softmax_type": _reader("softmax_type", "vanilla"),
    "post_self_attn_layernorm": _reader("post_self_attn_layernorm", False),
    "post_mlp_layernorm": _reader("post_mlp_layernorm", False),
    "window_size": lambda args: tuple(args["window_size"]) if args.get("window_size") else None,
    "window_attn_skip_freq": windows,
}
# Llama 3's scaling: --rotary-scaling-factor is not its factor, --rope-scaling-factor is.
_ROPE_LLAMA3: dict[str, Callable[[Args], Any]] = {
    "use_rope_scaling": _reader("use_rope_scaling", False),
    "rope_scaling_factor": lambda args: (
        _get(args, "rope_scaling_factor", 8.0) if _get(args, "use_rope_scaling", False) else None
    ),
}
# Yarn without latent attention, as Megatron-LM 0.19 reads it.
_ROPE_YARN: dict[str, Callable[[Args], Any]] = {
    "rotary_scaling_factor": _reader("rotary_scaling_factor", 1.0),
    "yarn_original_max_position_embeddings": _reader("yarn_original_max_position_embeddings", 4096),
    "yarn_beta_fast": _reader("yarn_beta_fast", 32.0),
    "yarn_beta_slow": _reader("yarn_beta_slow", 1.0),
    "yarn_correction_range_round_to_int": _reader("yarn_correction_range_round_to_int", True),
    "mscale": _reader("mscale", 1.0),
    "mscale_all_dim": _reader("mscale_all_dim", 0.0),
}
# Sparse attention in Megatron's own modules. Without the argument for its rotary embedding they are from before 0.19.
_SPARSE: dict[str, Callable[[Args], Any]] = {
    **{
        name: _reader(name, None)
        for name in (
            "experimental_attention_variant",
            "dsa_indexer_n_heads",
            "dsa_indexer_head_dim",
            "dsa_indexer_topk",
        )
    },
    "dsa_indexer_topk_freq": _reader("dsa_indexer_topk_freq", 1),
    "dsa_indexer_skip_topk_offset": lambda args: (
        max(_get(args, "dsa_indexer_skip_topk_offset", 0), 1) if _get(args, "dsa_indexer_topk_freq", 1) > 1 else 0
    ),
    "dsa_indexer_rope_interleaved": lambda args: str(
        args.get("dsa_indexer_rope_interleaved", "nothing, as before 0.19: there it turns other rows")
    ),
    "dsa_indexer_k_norm_epsilon": lambda args: _get(
        args, "dsa_indexer_k_norm_epsilon", _get(args, "norm_epsilon", 1e-5)
    ),
    "dsa_indexer_scoring_relu": _reader("dsa_indexer_scoring_relu", True),
}


# Linear attention in Megatron's own module.
_LINEAR: dict[str, Callable[[Args], Any]] = {
    "experimental_attention_variant": _reader("experimental_attention_variant", None),
    "linear_attention_freq": linear_layers,
    "linear_conv_kernel_dim": _reader("linear_conv_kernel_dim", 4),
    "linear_key_head_dim": _reader("linear_key_head_dim", 128),
    "linear_value_head_dim": _reader("linear_value_head_dim", 128),
    "linear_num_key_heads": _reader("linear_num_key_heads", 16),
    "linear_num_value_heads": _reader("linear_num_value_heads", 32),
}


def _sparse(dims: ModelDims, args: Args) -> dict[str, Callable[[Args], Any]]:
    """What to compare of an indexer or linear attention, where the run had Megatron's own.

    slime's modules for them read the HF config.
    """
    if args.get("experimental_attention_variant") is None:
        return {}
    return (_SPARSE if dims.indexer else {}) | (_LINEAR if dims.linear else {})


def _fields(dims: ModelDims) -> dict[str, Callable[[Args], Any]]:
    fields = {name: read for name, read in (_ALWAYS | _LAYER).items() if not (dims.mla and name in _NOT_LATENT)}
    fields |= _ROPE_YARN if comparable_args(dims)["position_embedding_type"] == "yarn" else {}
    fields |= {} if dims.mla else _ROPE_LLAMA3
    if dims.mla:
        fields |= _LATENT | (_YARN if dims.rope_scaling else {})
    # A model without dense layers never reads ffn_hidden_size.
    fields |= _DENSE if len(dims.dense) else {}
    fields |= _MOE if dims.experts else {}
    return fields | (_SOFTMAX if dims.experts and not dims.router_sigmoid else {})


def mismatches(dims: ModelDims, args: Args) -> Iterator[tuple[str, str, str]]:
    """Each argument that does not describe the model of `dims`, what it should be and what it is.

    Numbers are equal within a relative 1e-6.
    """
    expected = comparable_args(dims)
    for name, read in (_fields(dims) | _sparse(dims, args)).items():
        want, found = read(expected), read(args)
        if not _same(want, found):
            yield name, _text(want), "nothing" if found is None else _text(found)
    yield from _vocabulary(dims, args)


def differing(here: Args, there: Args) -> Iterator[tuple[str, str, str]]:
    """Each argument by which two runs build other models, and both values. A run may leave MTP layers out."""
    left_out = {"mtp_num_layers", *(_NOT_LATENT if _get(here, "multi_latent_attention", False) else ())}
    for name, read in (_ALWAYS | (_MOE if _get(here, "num_experts", 0) else {})).items():
        if name not in left_out and not _same(read(here), read(there)):
            yield name, _text(read(here)), _text(read(there))


def _vocabulary(dims: ModelDims, args: Args) -> Iterator[tuple[str, str, str]]:
    """`vocab_size`, which cuts rows at export, must be true where given; `padded_vocab_size` may only be larger."""
    vocab, padded = args.get("vocab_size"), args.get("padded_vocab_size")
    if vocab is not None and vocab != dims.vocab:
        yield "vocab_size", str(dims.vocab), str(vocab)
    if padded is not None and padded < dims.vocab:
        yield "padded_vocab_size", f"at least {dims.vocab}", str(padded)


def _same(want: Any, found: Any) -> bool:
    if isinstance(want, bool) or isinstance(found, bool):
        return bool(want) == bool(found)
    if isinstance(want, (int, float)) and isinstance(found, (int, float)):
        return math.isclose(want, found, rel_tol=1e-6)
    return bool(want == found)


def _text(value: Any) -> str:
    if isinstance(value, list) and set(value) <= {0, 1} and sorted(value) == value:
        return f"{value.count(0)} dense layers, then {value.count(1)} MoE layers"
    return str(value)


def compared(dims: ModelDims) -> int:
    """How many arguments `mismatches` looks at."""
    return len(_fields(dims)) + 2
