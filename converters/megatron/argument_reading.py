"""What Megatron makes of arguments where that is more than the argument or its default.

Source: Megatron-LM 0.13 to 0.19 `megatron/training/arguments.py`.
"""

from __future__ import annotations

from typing import Any

from converters.megatron.argument import Args


def get(args: Args, name: str, default: Any) -> Any:
    """An argument; None and absent both mean Megatron's default."""
    value = args.get(name)
    return default if value is None else value


def groups(args: Args) -> Any:
    """Without --group-query-attention every head has its own keys and values, whatever num_query_groups says."""
    if not get(args, "group_query_attention", False):
        return args.get("num_attention_heads")
    return get(args, "num_query_groups", 1)


def head_dim(args: Args) -> Any:
    """`kv_channels`, else the hidden size over the heads."""
    if args.get("kv_channels") is not None:
        return args["kv_channels"]
    hidden, heads = args.get("hidden_size"), args.get("num_attention_heads")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None


def positions(args: Args) -> Any:
    """The older --use-rotary-position-embeddings means the same."""
    if get(args, "use_rotary_position_embeddings", False):
        return "rope"
    return get(args, "position_embedding_type", "learned_absolute")


def latent_rope(args: Args) -> Any:
    """Latent attention takes yarn by default, which with a factor of 1 is plain rotary embedding."""
    return "rope" if get(args, "rotary_scaling_factor", 1.0) == 1 else get(args, "rope_type", "yarn")


def llama3_factor(args: Args) -> Any:
    """Llama 3's factor: --rotary-scaling-factor is another."""
    return get(args, "rope_scaling_factor", 8.0) if get(args, "use_rope_scaling", False) else None


def moe_layers(args: Args) -> Any:
    """1 for each layer with routed experts, else 0. `moe_layer_freq` is a number n (every n-th) or such a list."""
    layers, freq = args.get("num_layers"), get(args, "moe_layer_freq", 1)
    if not get(args, "num_experts", 0):
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


def no_rope(args: Args) -> Any:
    """1 for each layer without rotary embedding, else 0; None where all have it.

    `no_rope_freq` is a number n (every n-th) or such a list.
    """
    layers, freq = args.get("num_layers"), args.get("no_rope_freq")
    if isinstance(freq, int) and isinstance(layers, int) and freq > 0:
        freq = [int((layer + 1) % freq == 0) for layer in range(layers)]
    if not isinstance(freq, (list, tuple)):
        return freq or None
    return tuple(freq) if any(freq) else None


def indexer_first(args: Args) -> Any:
    """The first layers with an indexer of their own, which matter only where not all layers have one."""
    every = get(args, "dsa_indexer_topk_freq", 1)
    return max(get(args, "dsa_indexer_skip_topk_offset", 0), 1) if every > 1 else 0


def indexer_rope(args: Args) -> Any:
    """Without the argument, Megatron's modules are from before 0.19."""
    return str(args.get("dsa_indexer_rope_interleaved", "nothing, as before 0.19: there it turns other rows"))
