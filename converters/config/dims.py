"""The sizes and switches of a model, read from its HF config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ckptkit.converters.config.bounds import MAX_LAYERS
from ckptkit.converters.config.values import flag, integer, number, places, require, rope_of, wrong
from ckptkit.core.errors import CkptkitError

# Letters of `--hybrid-layer-pattern`; each layer of Megatron's HybridModel is a single block.
# Source: megatron-core 0.19 `models/hybrid/hybrid_layer_allocation.py`.
MIXER, ATTENTION, LATENT, SPARSE, LINEAR, DENSE, EXPERTS = "M", "*", "+", "D", "G", "-", "E"


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: ranks of the two compressions and head sizes.

    `q_rank`: None if queries are not compressed. `nope`: dimensions of a query or key head without rotary embedding;
    `rope`: dimensions with it (may be 0); `value`: size of a value head.
    """

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int

    def __post_init__(self) -> None:
        require_positive(self, "rope")


@dataclass(frozen=True)
class Indexer:
    """The indexer of DeepSeek sparse attention: its heads, their size, and how many keys a query attends to.

    `layers` have an indexer; the other layers use the previous indexer. `every` and `first` describe the same in
    Megatron's terms (`dsa_indexer_topk_freq`, `dsa_indexer_skip_topk_offset`): the first layers, then every n-th.
    `rope_interleaved`: its rotary dimensions rotate in pairs, not as two halves. `pool`: number of keys that it pools
    with learned weights, or 0.
    """

    heads: int
    head_dim: int
    top_k: int
    layers: tuple[int, ...]
    rope_interleaved: bool = False
    every: int = 1
    first: int = 0
    pool: int = 0

    def __post_init__(self) -> None:
        require_positive(self, "first", "pool")


@dataclass(frozen=True)
class LinearAttention:
    """Gated delta net: heads and head sizes of keys (and queries) and values, convolution kernel, and its layers."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        require_positive(self)
        if self.value_heads % self.key_heads:
            raise CkptkitError(
                f"config.json: {self.value_heads} value heads are not a multiple of {self.key_heads} key heads"
            )

    @property
    def conv(self) -> tuple[int, int, int]:
        """Rows of queries, keys and values in the convolution."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    @property
    def in_proj(self) -> tuple[int, ...]:
        """Rows of queries, keys, values, output gates, betas and alphas in Megatron's input projection."""
        return *self.conv, self.conv[2], self.value_heads, self.value_heads


@dataclass(frozen=True)
class Mamba:
    """A Mamba-2 mixer (megatron-core `ssm/mamba_mixer.py`); the heads of a group share B and C."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int

    def __post_init__(self) -> None:
        require_positive(self)
        if self.heads % self.groups:
            raise CkptkitError(f"config.json: {self.heads} Mamba heads are not a multiple of n_groups {self.groups}")

    @property
    def inner(self) -> int:
        """Features inside the mixer."""
        return self.heads * self.head_dim

    @property
    def conv(self) -> tuple[int, int, int]:
        """Rows of x, B and C in the convolution."""
        return self.inner, self.groups * self.state, self.groups * self.state

    @property
    def in_proj(self) -> tuple[int, ...]:
        """Rows of z, x, B, C and dt in the input projection."""
        return self.inner, *self.conv, self.heads


@dataclass(frozen=True)
class Kda:
    """Kimi delta attention: its heads and their size, and convolution kernel."""

    heads: int
    head_dim: int
    kernel: int

    def __post_init__(self) -> None:
        require_positive(self)


@dataclass(frozen=True)
class ModelDims:
    """The facts of an HF config that rules and Megatron models need. Sizes are in elements; 0 experts means dense.

    `root`: HF prefix of `layers.0.`. `head`: HF name of the output embedding. `dense_layers`: layers of an MoE model
    with a plain MLP. `window_layers`: layers with attention over `window` tokens and, if set, the rotary base
    `local_rope_theta`. `norm_offset`: norm weights are stored minus one. `qk_norm_full`: q and k norms over all
    heads at once. `sandwich`: norms also after attention and MLP, which in Megatron are modules of the "layer" (slime's
    patch) or inside the preceding "linear" (Megatron-Bridge). `activation`: silu, gelu_pytorch_tanh, or GPT-OSS's
    quick_geglu, which is x sigmoid(1.702 x) with gate and up clamped and 1 added to up; or relu2, the squared
    ReLU of an MLP without a gate. `attention_gate`: q_proj also computes an output gate. `query_scale_from`: from this
    position on, queries are multiplied by a factor that grows with the position. `sinks`: a learned softmax logit per
    head. `mtp_layers`: multi-token prediction layers after the last. `pattern`: one letter of Megatron's layer
    pattern per layer, if each layer is only a mixer, attention, an MLP or experts; `mtp_pattern`: the same for one
    multi-token prediction layer. `mixer_layers`: layers with a Mamba mixer or KDA instead of softmax attention, in
    models where each layer also has an MLP or experts. `rotary`: attention has rotary embedding, except in
    `nope_layers`. `expert_hidden`: hidden size inside routed experts, or None for `hidden`. `own`: values that only the
    family's rules read.
    """

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
    qkv_bias: bool = False
    qk_norm: bool = False
    root: str = "model."
    head: str = "lm_head.weight"
    activation: str = "silu"
    rope_interleaved: bool = False
    local_rope_theta: float | None = None
    window: int | None = None
    window_layers: tuple[int, ...] = ()
    attention_scale: float | None = None
    query_scale_from: int | None = None
    embedding_scale: float | None = None
    out_bias: bool = False
    mlp_bias: bool = False
    norm_offset: bool = False
    qk_norm_full: bool = False
    sandwich: Literal["", "layer", "linear"] = ""
    attention_gate: bool = False
    sinks: bool = False
    mtp_layers: int = 0
    mla: Mla | None = None
    indexer: Indexer | None = None
    linear: LinearAttention | None = None
    pattern: str = ""
    mtp_pattern: str = ""
    mamba: Mamba | None = None
    kda: Kda | None = None
    mixer_layers: tuple[int, ...] = ()
    rotary: bool = True
    nope_layers: tuple[int, ...] = ()
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    expert_hidden: int | None = None
    shared_ffn: int = 0
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()
    router_sigmoid: bool = False
    router_bias: bool = False
    router_scale: float | None = None
    router_groups: int | None = None
    router_top_groups: int | None = None
    router_normalize: bool = True
    own: Any = None

    def __post_init__(self) -> None:
        require_positive(self, *_MAY_BE_ZERO)
        if self.norm_eps <= 0:
            raise wrong("rms_norm_eps", self.norm_eps, "positive")
        if self.layers > MAX_LAYERS:
            raise wrong("num_hidden_layers", self.layers, f"at most {MAX_LAYERS:,}")
        if self.mtp_layers > self.layers:
            raise wrong("the number of multi-token prediction layers", self.mtp_layers, f"at most {self.layers}")
        if self.experts and not 0 < self.top_k <= self.experts:
            raise wrong("num_experts_per_tok", self.top_k, f"from 1 to {self.experts}, the number of experts")
        if self.experts and not self.expert_ffn:
            raise wrong("moe_intermediate_size", self.expert_ffn, "positive")
        if self.heads % self.groups:
            message = f"{self.heads} attention heads are not a multiple of {self.groups} key-value heads"
            raise CkptkitError(f"config.json: {message}")
        if set(self.dense_layers) - set(range(self.layers)):
            raise CkptkitError(f"config.json: dense layer {max(self.dense_layers)} is not one of {self.layers} layers")

    @property
    def all_layers(self) -> tuple[int, ...]:
        """All layers except multi-token prediction layers."""
        return tuple(range(self.layers))

    @property
    def dense(self) -> tuple[int, ...]:
        """Layers with a plain MLP."""
        if self.pattern:
            return places(self.pattern, DENSE)
        return self.dense_layers if self.experts else self.all_layers

    @property
    def moe(self) -> tuple[int, ...]:
        """Layers with routed experts."""
        if self.pattern:
            return places(self.pattern, EXPERTS)
        dense = set(self.dense)
        return tuple(layer for layer in self.all_layers if layer not in dense)

    @property
    def softmax_layers(self) -> tuple[int, ...]:
        """Layers with softmax attention: not those with linear attention or a mixer, or only an MLP or experts."""
        if self.pattern:
            return places(self.pattern, ATTENTION)
        excluded = {*(self.linear.layers if self.linear else ()), *self.mixer_layers}
        return tuple(layer for layer in self.all_layers if layer not in excluded)

    @property
    def mixers(self) -> tuple[int, ...]:
        """Layers with a Mamba mixer or with KDA."""
        return places(self.pattern, MIXER) if self.pattern else self.mixer_layers


# The usual keys of config.json for fields with different names.
_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "groups": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "window": "sliding_window",
    "max_positions": "max_position_embeddings",
    "experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
    "expert_hidden": "moe_latent_size",
}
_MAY_BE_ZERO = ("mtp_layers", "experts", "top_k", "expert_ffn", "shared_ffn")


def require_positive(sizes: object, *may_be_zero: str) -> None:
    """Raises CkptkitError for an integer that is negative, or 0 and not in `may_be_zero`."""
    for name, size in vars(sizes).items():
        if type(size) is int and size < (name not in may_be_zero):
            key = _KEYS.get(name, name)
            raise CkptkitError(f"config.json: {key} must be positive, not {size}", "compare it with the release")


def first_layers(config: Mapping[str, Any], key: str, default: int) -> tuple[int, ...]:
    """Layers 0 to n - 1, where n is the value of `key`: the dense layers at the start of an MoE model."""
    count = integer(config, key, default)
    if not 0 <= count <= MAX_LAYERS:
        raise wrong(key, count, f"a number of layers up to {MAX_LAYERS:,}")
    return tuple(range(count))


def layers_without_experts(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The dense layers of a Qwen MoE model: `mlp_only_layers`, and all but every `decoder_sparse_step`-th from 1.

    Source: transformers `Qwen2MoeDecoderLayer`, `Qwen3MoeDecoderLayer`.
    """
    step, only = integer(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if step < 1:
        raise wrong("decoder_sparse_step", step, "a positive whole number")
    layers = min(integer(config, "num_hidden_layers"), MAX_LAYERS)
    if not isinstance(only, list) or any(type(layer) is not int or not 0 <= layer < layers for layer in only):
        raise wrong("mlp_only_layers", only, f"a list of whole numbers below {layers}")
    sparse = (layer for layer in range(layers) if (layer + 1) % step)
    return tuple(sorted({*only, *sparse}))


def read_experts(
    config: Mapping[str, Any], count: str = "num_experts", ffn: str = "moe_intermediate_size"
) -> dict[str, Any]:
    """Sizes of a mixture of experts as arguments of `base_dims`; `count` and `ffn` are keys of the config."""
    return {
        "experts": integer(config, count),
        "top_k": integer(config, "num_experts_per_tok"),
        "expert_ffn": integer(config, ffn),
    }


def base_dims(
    config: Mapping[str, Any], *, activation: str = "silu", default_theta: float = 10000.0, **more: Any
) -> ModelDims:
    """ModelDims from the keys that all decoder-only families share, and from the fields in `more`.

    `activation`: the required `hidden_act`; `default_theta`: the rotary base of a config without one. A `window`
    applies to all layers unless `window_layers` are given.
    """
    require(config, str(config.get("model_type")), {"hidden_act": activation}, strict=True)
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    rope = rope_of(config, default_theta)
    shared: dict[str, Any] = {
        "layers": integer(config, "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "groups": integer(config, "num_key_value_heads", heads),
        "head_dim": integer(config, "head_dim", hidden // max(heads, 1)),
        "ffn": integer(config, "intermediate_size"),
        "vocab": integer(config, "vocab_size"),
        "tied": flag(config, "tie_word_embeddings", False),
        "norm_eps": number(config, "rms_norm_eps"),
        "rope_theta": rope["rope_theta"],
        "rotary_fraction": number(rope, "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0)),
        "rope_scaling": rope if rope["rope_type"] != "default" else None,
        "max_positions": integer(config, "max_position_embeddings", 4096),
        "initializer_range": number(config, "initializer_range", 0.02),
    }
    if more.get("window"):
        shared["window_layers"] = tuple(range(shared["layers"]))
    return ModelDims(**(shared | {"activation": activation} | more))
