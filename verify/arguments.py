"""Megatron's training arguments held against an HF config, field by field, with Megatron's own defaults for absent ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from converters.arguments import comparable_args
from converters.dims import ModelDims

Args = Mapping[str, Any]


@dataclass(frozen=True)
class Mismatch:
    """One argument that belongs to another model."""

    argument: str
    expected: str
    actual: str


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
    """Layers with routed experts as a list of 0 and 1. `moe_layer_freq` is a number f (every f-th layer) or such a list."""
    layers, freq = args.get("num_layers"), _get(args, "moe_layer_freq", 1)
    if not _get(args, "num_experts", 0):
        return [0] * layers if isinstance(layers, int) else None
    if isinstance(freq, int) and isinstance(layers, int) and freq > 0:
        return [int(layer % freq == 0) for layer in range(layers)]
    return list(freq) if isinstance(freq, (list, tuple)) else freq


def _positions(args: Args) -> Any:
    # The older --use-rotary-position-embeddings means the same.
    return "rope" if _get(args, "use_rotary_position_embeddings", False) else _get(args, "position_embedding_type", "learned_absolute")


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
    "add_qkv_bias": lambda args: _get(args, "add_qkv_bias", False),
    "add_bias_linear": lambda args: _get(args, "add_bias_linear", True),
    "swiglu": lambda args: _get(args, "swiglu", False),
    "normalization": lambda args: _get(args, "normalization", "LayerNorm"),
    "position_embedding_type": _positions,
    "untie_embeddings_and_output_weights": lambda args: _get(args, "untie_embeddings_and_output_weights", False),
    "num_experts": lambda args: _get(args, "num_experts", 0),
}
_MOE: dict[str, Callable[[Args], Any]] = {
    "moe_layer_freq": moe_layers,
    "moe_ffn_hidden_size": _expert_ffn,
    "moe_shared_expert_intermediate_size": lambda args: _get(args, "moe_shared_expert_intermediate_size", 0),
    "moe_router_topk": lambda args: _get(args, "moe_router_topk", 2),
    "moe_router_score_function": lambda args: _get(args, "moe_router_score_function", "softmax"),
    "moe_router_enable_expert_bias": lambda args: _get(args, "moe_router_enable_expert_bias", False),
    "moe_router_topk_scaling_factor": lambda args: _get(args, "moe_router_topk_scaling_factor", 1.0),
    "moe_router_num_groups": lambda args: _get(args, "moe_router_num_groups", 1),
    "moe_router_group_topk": lambda args: _get(args, "moe_router_group_topk", 1),
}
# Softmax before or after top-k: a sigmoid router does not look at it.
_SOFTMAX: dict[str, Callable[[Args], Any]] = {"moe_router_pre_softmax": lambda args: _get(args, "moe_router_pre_softmax", False)}
_DENSE: dict[str, Callable[[Args], Any]] = {"ffn_hidden_size": lambda args: args.get("ffn_hidden_size")}


def _fields(dims: ModelDims) -> dict[str, Callable[[Args], Any]]:
    fields = dict(_ALWAYS)
    # A model without dense layers never reads ffn_hidden_size.
    fields |= _DENSE if len(dims.dense) else {}
    fields |= _MOE if dims.experts else {}
    return fields | (_SOFTMAX if dims.experts and not dims.router_sigmoid else {})


def mismatches(dims: ModelDims, args: Args) -> Iterator[Mismatch]:
    """Every argument that does not describe the model of `dims`; numbers are equal within a relative 1e-6."""
    expected = comparable_args(dims)
    for name, read in _fields(dims).items():
        want, found = read(expected), read(args)
        if not _same(want, found):
            yield Mismatch(name, _text(want), "nothing" if found is None else _text(found))
    yield from _vocabulary(dims, args)


def _vocabulary(dims: ModelDims, args: Args) -> Iterator[Mismatch]:
    """`vocab_size` cuts rows at export, so it must be true where it is given; `padded_vocab_size` may only be larger."""
    vocab, padded = args.get("vocab_size"), args.get("padded_vocab_size")
    if vocab is not None and vocab != dims.vocab:
        yield Mismatch("vocab_size", str(dims.vocab), str(vocab))
    if padded is not None and padded < dims.vocab:
        yield Mismatch("padded_vocab_size", f"at least {dims.vocab}", str(padded))


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
