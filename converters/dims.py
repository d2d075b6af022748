"""The sizes and switches of a model, read from its HF config, and the Megatron arguments that follow from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.errors import CkptkitError

_MOST_LAYERS = 10_000


@dataclass(frozen=True)
class ModelDims:
    """What a rule or a Megatron model needs to know of an HF config. Sizes are in elements; 0 experts means dense."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    norm_eps: float
    rope_theta: float
    rotary_fraction: float
    rope_scaling: Mapping[str, Any] | None
    max_positions: int
    initializer_range: float
    qkv_bias: bool
    qk_norm: bool
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    router_sigmoid: bool = False
    router_bias: bool = False
    router_scale: float | None = None
    router_groups: int | None = None
    router_top_groups: int | None = None
    router_normalize: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "groups", "head_dim", "ffn", "vocab", "norm_eps"):
            if getattr(self, name) <= 0:
                raise CkptkitError(f"config.json: {name} must be positive, not {getattr(self, name)}", "compare it with the release")
        if self.layers > _MOST_LAYERS:
            raise CkptkitError(f"config.json: {self.layers} layers cannot be right", "compare num_hidden_layers with the release")
        if self.experts and not 0 < self.top_k <= self.experts:
            raise CkptkitError(f"config.json: {self.top_k} experts a token out of {self.experts}", "compare num_experts_per_tok with the release")
        if self.heads % self.groups:
            raise CkptkitError(f"config.json: {self.heads} attention heads do not divide into {self.groups} key-value heads")
        if not 0 <= self.dense_layers <= self.layers:
            raise CkptkitError(f"config.json: {self.dense_layers} dense layers of {self.layers} layers")

    @property
    def dense(self) -> range:
        """Layers with a plain MLP."""
        return range(self.layers if not self.experts else self.dense_layers)

    @property
    def moe(self) -> range:
        """Layers with routed experts."""
        return range(len(self.dense), self.layers)


_REQUIRED: Any = object()


def integer(config: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> int:
    """A whole number of the config; absent and null mean `default`. Raises CkptkitError naming the key."""
    value = _value(config, key, default)
    if type(value) is not int:
        raise _wrong(key, value, "a whole number")
    return value


def number(config: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> float:
    """A finite number of the config; absent and null mean `default`. Raises CkptkitError naming the key."""
    value = _value(config, key, default)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _wrong(key, value, "a finite number")
    return float(value)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """A switch of the config; absent and null mean `default`. Raises CkptkitError naming the key."""
    value = _value(config, key, default)
    if type(value) is not bool:
        raise _wrong(key, value, "true or false")
    return value


def _value(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key)
    if value is None and default is _REQUIRED:
        raise CkptkitError(f"config.json has no {key!r}", f"a {config.get('model_type')} config must state it; compare with the release")
    return default if value is None else value


def _wrong(key: str, value: Any, what: str) -> CkptkitError:
    return CkptkitError(f"config.json: {key} is {value!r}, not {what}", "compare it with the release")


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings under either spelling: `rope_parameters` (transformers v5) or `rope_theta` and `rope_scaling` (v4).

    Raises CkptkitError when both are there and disagree on theta: readers of v4 and v5 would then run different models.
    """
    v5, v4 = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for key, value in (("rope_parameters", v5), ("rope_scaling", v4)):
        if not isinstance(value, dict):
            raise _wrong(key, value, "an object")
    theta4, theta5 = config.get("rope_theta"), v5.get("rope_theta")
    if theta4 is not None and theta5 is not None and number(config, "rope_theta") != number(v5, "rope_theta"):
        raise CkptkitError(
            f"config.json: rope_theta is {theta4} but rope_parameters says {theta5}",
            "transformers v4 reads the first and v5 the second; make them equal",
        )
    rope = {**v4, **v5}
    rope["rope_theta"] = number(v5, "rope_theta", number(config, "rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    return rope


def base_dims(config: Mapping[str, Any], *, qkv_bias: bool, qk_norm: bool, **more: Any) -> ModelDims:
    """The part of ModelDims that every decoder-only family spells the same way."""
    if config.get("hidden_act", "silu") != "silu":
        raise CkptkitError(f"config.json: hidden_act {config['hidden_act']!r} is not supported", "these families are trained with silu")
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    rope = rope_of(config)
    scaled = rope["rope_type"] != "default"
    return ModelDims(
        layers=integer(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        groups=integer(config, "num_key_value_heads", heads),
        head_dim=integer(config, "head_dim", hidden // max(heads, 1)),
        ffn=integer(config, "intermediate_size"),
        vocab=integer(config, "vocab_size"),
        tied=flag(config, "tie_word_embeddings", False),
        norm_eps=number(config, "rms_norm_eps"),
        rope_theta=rope["rope_theta"],
        rotary_fraction=number(rope, "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0)),
        rope_scaling=rope if scaled else None,
        max_positions=integer(config, "max_position_embeddings", 4096),
        initializer_range=number(config, "initializer_range", 0.02),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        **more,
    )


def megatron_args(dims: ModelDims) -> dict[str, Any]:
    """Megatron-LM arguments (argparse names) of this model, as a training run of it would have stored them.

    Only plain values, so that the restricted loaders of every Megatron version accept them. Rope scaling is not among them.
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
        "rotary_base": int(dims.rope_theta) if dims.rope_theta.is_integer() else dims.rope_theta,
        "rotary_percent": dims.rotary_fraction,
        "rotary_interleaved": False,
        "normalization": "RMSNorm",
        "norm_epsilon": dims.norm_eps,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": dims.qkv_bias,
        "qk_layernorm": dims.qk_norm,
        "untie_embeddings_and_output_weights": not dims.tied,
        "vocab_size": dims.vocab,
        "padded_vocab_size": dims.vocab,
        "init_method_std": dims.initializer_range,
        "tokenizer_type": "HuggingFaceTokenizer",
        "num_experts": dims.experts or None,
    }
    return args | (_moe_args(dims) if dims.experts else {})


def _moe_args(dims: ModelDims) -> dict[str, Any]:
    return {
        "moe_layer_freq": [int(layer in dims.moe) for layer in range(dims.layers)],
        "moe_ffn_hidden_size": dims.expert_ffn,
        "moe_shared_expert_intermediate_size": dims.shared_ffn or None,
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
