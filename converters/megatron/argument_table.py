"""The table of Megatron-LM arguments that ckptkit stores, prints, compares or reads, in printed order.

It determines stored arguments, printed options, the comparison with config.json, the options that preflight reads, and
the settings of the Megatron witness.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ckptkit.converters.blocks.latent_attention import WITHOUT_FLAG
from ckptkit.converters.config.values import flag
from ckptkit.converters.megatron import argument as reading
from ckptkit.converters.megatron import argument_values as values
from ckptkit.converters.megatron.argument import Argument, always, get, never
from ckptkit.converters.megatron.argument_values import (
    fixed,
    inside_layer,
    latent_scaled,
    linear_rope,
    llama3,
    not_latent,
    ones,
    rope_number,
    squared_relu,
    yarn,
)

# Stored for other programs; it follows from the other arguments.
_stored = partial(Argument, compared=never, printed="never")
_latent = partial(Argument, when="mla")
_linear = partial(Argument, when="linear", own_modules=True)
_indexer = partial(Argument, when="indexer", own_modules=True)
_mamba = partial(Argument, when="mamba")
_moe = partial(Argument, when="experts")
# YaRN with latent attention, without, and both.
_latent_yarn = partial(Argument, when=latent_scaled)
_yarn = partial(Argument, when=yarn)
_any_yarn = partial(Argument, when=lambda dims: latent_scaled(dims) or yarn(dims))
# Rare features inside a layer; stored if they differ from Megatron's default, and compared for all models.
_layer = partial(Argument, compared=inside_layer)
_window = partial(_layer, when=lambda dims: dims.window is not None)
_clamped = partial(_layer, when=lambda dims: dims.activation == "quick_geglu")
_sandwich = partial(_layer, when=lambda dims: dims.sandwich == "layer")
# Like `not_latent`, but two runs are not compared by it.
_llama3 = partial(Argument, when=llama3, compared=lambda dims: not_latent(dims))

ARGUMENTS = (
    Argument("num_layers", int, "layers"),
    Argument("hidden_size", int, "hidden"),
    Argument("ffn_hidden_size", int, "ffn", compared="dense"),
    Argument("num_attention_heads", int, "heads"),
    # `launch_flags` prints these two together.
    _stored("group_query_attention", bool, lambda dims: dims.groups != dims.heads),
    Argument("num_query_groups", int, "groups", compared=not_latent, read=reading.groups, printed="never"),
    Argument("kv_channels", int, "head_dim", compared=not_latent, read=reading.head_dim),
    Argument("max_position_embeddings", int, "max_positions", compared=never),
    _stored("seq_length", int, "max_positions"),
    Argument("position_embedding_type", str, values.positions, read=reading.positions),
    _stored("add_position_embedding", bool, fixed(True), switches={"--no-position-embedding": False}),
    _stored("use_rotary_position_embeddings", bool, lambda dims: values.positions(dims) == "rope"),
    Argument("rotary_base", int, values.rotary_base, 10000, when="rotary"),
    Argument("rotary_percent", float, "rotary_fraction", 1.0, when="rotary"),
    _layer("rotary_interleaved", bool, "rope_interleaved"),
    Argument("normalization", str, fixed("RMSNorm"), "LayerNorm"),
    Argument(
        "norm_epsilon",
        float,
        "norm_eps",
        read=lambda args: get(args, "norm_epsilon", get(args, "layernorm_epsilon", 1e-5)),
        config="layernorm_epsilon",
    ),
    _layer("apply_layernorm_1p", bool, "norm_offset", config="layernorm_zero_centered_gamma"),
    Argument("swiglu", bool, lambda dims: dims.activation == "silu", config="gated_linear_unit"),
    Argument("squared_relu", bool, squared_relu, compared=squared_relu),
    Argument("apply_query_key_layer_scaling", None, fixed(False), compared=never),
    # Megatron's default is 0.1.
    Argument("attention_dropout", float, fixed(0.0), compared=never, of_run=True),
    Argument("hidden_dropout", float, fixed(0.0), compared=never, of_run=True),
    # One switch for attention and MLP; families reject a model with biases in only one of them.
    Argument("add_bias_linear", bool, "mlp_bias", switches={"--disable-bias-linear": False}),
    Argument(
        "add_qkv_bias",
        bool,
        "qkv_bias",
        compared=not_latent,
        read=lambda args: get(args, "add_qkv_bias", False) or get(args, "add_bias_linear", True),
    ),
    Argument("qk_layernorm", bool, lambda dims: dims.qk_norm or dims.mla is not None),
    Argument("untie_embeddings_and_output_weights", bool, lambda dims: not dims.tied),
    Argument("vocab_size", int, "vocab", compared=never),
    _stored("padded_vocab_size", int, "vocab"),
    Argument("make_vocab_size_divisible_by", int, compared=never),
    _stored("init_method_std", None, "initializer_range"),
    _stored("tokenizer_type", None, fixed("HuggingFaceTokenizer")),
    Argument("num_experts", int, lambda dims: dims.experts or None, 0, config="num_moe_experts"),
    # Megatron stores None without --mtp-num-layers.
    Argument("mtp_num_layers", int, lambda dims: dims.mtp_layers or None, 0),
    # slime's exporter reads it for every model.
    Argument("q_lora_rank", int, lambda dims: dims.mla.q_rank if dims.mla else None, compared="mla"),
    _latent("multi_latent_attention", bool, fixed(True), compared=always),
    _latent("kv_lora_rank", int, "mla.kv_rank", 32),
    _latent("qk_head_dim", int, "mla.nope", 128),
    _latent("qk_pos_emb_head_dim", int, "mla.rope", 64),
    _latent("v_head_dim", int, "mla.value", 128),
    _latent("rope_type", str, lambda dims: "yarn" if dims.rope_scaling else "rope", read=reading.latent_rope),
    # Megatron's latent attention reads it for every type, and its default is 40.
    Argument("rotary_scaling_factor", float, values.scaling_factor, 1.0, when=lambda dims: dims.mla or yarn(dims)),
    _llama3("use_rope_scaling", bool, fixed(True)),
    # No Megatron builder passes it to the model; see `inexpressible`.
    _llama3("rope_scaling_factor", float, rope_number("factor"), read=reading.llama3_factor, printed="never"),
    Argument(
        "rotary_seq_len_interpolation_factor",
        int,
        lambda dims: int(values.scaling_factor(dims)),
        when=linear_rope,
        compared=never,
    ),
    *(
        _latent_yarn(name, kind, value, WITHOUT_FLAG[name], printed="comment")
        for name, kind, value in (
            ("original_max_position_embeddings", int, values.original_positions),
            ("beta_fast", float, rope_number("beta_fast", 32.0)),
            ("beta_slow", float, rope_number("beta_slow", 1.0)),
        )
    ),
    _yarn("yarn_original_max_position_embeddings", int, values.original_positions, 4096),
    _yarn("yarn_beta_fast", float, rope_number("beta_fast", 32.0), 32.0),
    _yarn("yarn_beta_slow", float, rope_number("beta_slow", 1.0), 1.0),
    _any_yarn("mscale", float, lambda dims: values.mscales(dims)[0], 1.0),
    _any_yarn("mscale_all_dim", float, lambda dims: values.mscales(dims)[1], 0.0),
    _yarn(
        "yarn_correction_range_round_to_int",
        bool,
        lambda dims: flag(dims.rope_scaling or {}, "truncate", True),
        switches={"--yarn-correction-range-round-to-int": True, "--no-yarn-correction-range-round-to-int": False},
    ),
    _window("window_size", "sizes", values.window_size, read=lambda args: tuple(args.get("window_size") or ()) or None),
    _window("window_attn_skip_freq", "frequency", values.window_layers, read=reading.windows),
    _layer(
        "no_rope_freq", "frequency", lambda dims: ones(dims, dims.nope_layers), when="nope_layers", read=reading.no_rope
    ),
    _clamped("quick_geglu", bool, fixed(True)),
    _clamped("glu_linear_offset", float, fixed(1.0), 0.0),
    _clamped("activation_func_clamp_value", float, fixed(7.0)),
    _layer("attention_output_gate", bool, fixed(True), when="attention_gate"),
    _layer("softmax_type", str, fixed("learnable"), "vanilla", when="sinks"),
    _sandwich("post_self_attn_layernorm", bool, fixed(True)),
    _sandwich("post_mlp_layernorm", bool, fixed(True)),
    Argument(
        "experimental_attention_variant",
        str,
        lambda dims: "dsa" if dims.indexer else "gated_delta_net",
        when=lambda dims: dims.linear or dims.indexer,
        own_modules=True,
    ),
    _linear(
        "linear_attention_freq",
        "frequency",
        lambda dims: ones(dims, dims.linear.layers if dims.linear else ()),
        read=reading.linear_layers,
    ),
    _mamba("mamba_state_dim", int, "mamba.state", 128),
    _mamba("mamba_head_dim", int, "mamba.head_dim", 64),
    _mamba("mamba_num_groups", int, "mamba.groups", 8),
    _mamba("mamba_num_heads", int, "mamba.heads"),
    _linear("linear_conv_kernel_dim", int, "linear.kernel", 4),
    _linear("linear_key_head_dim", int, "linear.key_dim", 128),
    _linear("linear_value_head_dim", int, "linear.value_dim", 128),
    _linear("linear_num_key_heads", int, "linear.key_heads", 16),
    _linear("linear_num_value_heads", int, "linear.value_heads", 32),
    # Sparse attention's Hadamard transform is left at Megatron's default: it changes no score.
    _indexer("dsa_indexer_n_heads", int, "indexer.heads"),
    _indexer("dsa_indexer_head_dim", int, "indexer.head_dim"),
    _indexer("dsa_indexer_topk", int, "indexer.top_k"),
    _indexer("dsa_indexer_topk_freq", int, "indexer.every", 1),
    _indexer("dsa_indexer_skip_topk_offset", int, "indexer.first", read=reading.indexer_first),
    _indexer("dsa_indexer_rope_interleaved", bool, "indexer.rope_interleaved", read=reading.indexer_rope),
    # transformers and SGLang normalize the keys with this epsilon and ignore rms_norm_eps.
    _indexer(
        "dsa_indexer_k_norm_epsilon",
        float,
        fixed(1e-6),
        read=lambda args: get(args, "dsa_indexer_k_norm_epsilon", get(args, "norm_epsilon", 1e-5)),
    ),
    _indexer(
        "dsa_indexer_scoring_relu",
        bool,
        switches={"--no-dsa-indexer-scoring-relu": False, "--disable-dsa-indexer-scoring-relu": False},
    ),
    _moe("moe_layer_freq", "frequency", lambda dims: ones(dims, dims.moe), read=reading.moe_layers),
    _moe(
        "moe_ffn_hidden_size",
        int,
        "expert_ffn",
        read=lambda args: get(args, "moe_ffn_hidden_size", args.get("ffn_hidden_size")),
    ),
    _moe("moe_shared_expert_intermediate_size", int, lambda dims: dims.shared_ffn or None, 0),
    _moe("moe_latent_size", int, "expert_hidden", when="expert_hidden", compared="experts"),
    _moe("moe_shared_expert_gate", bool, "shared_gate"),
    _moe("moe_router_topk", int, "top_k", 2),
    _moe("moe_router_score_function", str, lambda dims: "sigmoid" if dims.router_sigmoid else "softmax", "softmax"),
    # Softmax before or after top-k; a sigmoid router ignores it.
    _moe(
        "moe_router_pre_softmax",
        bool,
        lambda dims: not dims.router_normalize or dims.router_sigmoid,
        compared=lambda dims: dims.experts and not dims.router_sigmoid,
    ),
    _moe("moe_router_enable_expert_bias", bool, "router_bias"),
    _moe("moe_router_topk_scaling_factor", float, "router_scale", 1.0),
    _moe("moe_router_num_groups", int, "router_groups", 1),
    _moe("moe_router_group_topk", int, "router_top_groups", 1),
    _moe("moe_router_dtype", str, fixed("fp32"), compared=never, of_run=True),
    _moe("moe_grouped_gemm", bool, fixed(True), compared=never, of_run=True),
    Argument("moe_permute_fusion", bool, compared=never, of_run=True),
    # HybridModel's; see `hybrid_model.py`.
    Argument("hybrid_layer_pattern", str, compared=never),
    Argument("hybrid_override_pattern", str, compared=never),
)
BY_NAME: Mapping[str, Argument] = {row.name: row for row in ARGUMENTS}
