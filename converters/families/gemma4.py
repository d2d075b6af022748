"""Gemma 4: full layers with heads of another size, four norms and a scalar a layer, a softcap.

In most sizes full layers take their keys for values. 26B-A4B has experts beside the MLP. E2B and E4B have an embedding
for each layer, and their last layers use the keys and values of earlier ones.

Stacks that train these models disagree about their names in Megatron, so the rules have HF's on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from converters.blocks.decoder import attention, embeddings, gated_mlp
from converters.config.dims import Attention, ModelDims, base_dims, read_experts, require_positive
from converters.config.values import (
    NESTED_ROOT,
    agreed,
    flag,
    integer,
    number,
    require,
    rope_of,
    sliding_layers,
    text_config_of,
    unsupported,
    window_of,
    wrong,
)
from converters.family import QKV_GATE_UP, EngineClass, ModelFamily, Release, TieFlag, Unwitnessed
from converters.ops.shapes import Shape
from converters.rules import NamePrefix, ParamMapping, decoder, unnamed

# What a config leaves out means; transformers `Gemma4TextConfig`, `Gemma4UnifiedTextConfig`.
_DEFAULTS = {
    "vocab_size": 262144,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
}
_UNIFIED = {"hidden_size_per_layer_input": 0, "max_position_embeddings": 262144, "sliding_window": 1024}
_ONLY = {
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": "vision",
}
_ROPES = {"full_attention": ("proportional", 1_000_000.0, 0.25), "sliding_attention": ("default", 10_000.0, 1.0)}
# Marks a config whose tensors have keys and values in layers that use those of another (`_with_unused`).
_STORED = "_stores_unused_keys"
_KEYS = ("k_proj.weight", "v_proj.weight", "k_norm.weight")


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a config of Gemma 4. Source: transformers `Gemma4TextModel`, `Gemma4UnifiedTextModel`.

    Raises CkptkitError for what readers compute differently, naming the key.
    """
    text, root = _text(config)
    require(text, "gemma4", _ONLY)
    rope = _ropes(text)
    if (cap := text.get("final_logit_softcapping")) is not None and number(text, "final_logit_softcapping") <= 0:
        raise wrong("final_logit_softcapping", cap, "a positive number")
    hidden, window = integer(text, "hidden_size"), window_of(text, absent=512)
    sliding = sliding_layers(text, 6)
    dims = base_dims(
        {**text, "rope_parameters": {"rope_theta": rope["full_attention"]}, "rope_theta": None},
        qk_norm=True,
        activation="gelu_pytorch_tanh",
        tied=flag(config, "tie_word_embeddings", True),
        root=root,
        window=window,
        window_layers=sliding,
        local_rope_theta=rope["sliding_attention"],
        attention_scale=1.0,
        embedding_scale=hidden**0.5,
        **_experts(text),
    )
    full = tuple(layer for layer in dims.all_layers if layer not in set(sliding))
    if not full or full[-1] != dims.layers - 1:
        raise unsupported("gemma4 with a sliding window in the last layer", "transformers makes it a full one")
    own = _own(text, dims)
    return replace(dims, other_attention=_full_attention(text, dims, full), own=own)


def _text(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The language model's part with its defaults, and the HF prefix of its names."""
    model_type = str(config["model_type"])
    nested = not model_type.endswith("_text")
    text = text_config_of(config) if nested else config
    unified = "unified" in model_type
    if unified and (text.get("enable_moe_block") or text.get("hidden_size_per_layer_input")):
        what = f"{model_type} with enable_moe_block or hidden_size_per_layer_input"
        raise unsupported(what, "its class has none; another model_type has them")
    # An absent size has a default, and null is a value of these alone.
    sizes = {} if text.get("per_layer_config") is not None else {"global_head_dim": 512}
    kept = {key: value for key, value in text.items() if value is not None or key in sizes}
    return _DEFAULTS | sizes | (_UNIFIED if unified else {}) | kept, NESTED_ROOT if nested else "model."


def _ropes(text: Mapping[str, Any]) -> dict[str, float]:
    """The rotary base of each kind of layer. Raises CkptkitError for any other rotary embedding than the releases'."""
    kinds = text.get("rope_parameters") or {
        kind: {"rope_type": rope_type, "partial_rotary_factor": fraction}
        for kind, (rope_type, _, fraction) in _ROPES.items()
    }
    if kinds.keys() != _ROPES.keys() or text.get("rope_scaling"):
        raise wrong("rope_parameters", kinds, f"an object with {' and '.join(_ROPES)}")
    found = {}
    for kind, (rope_type, theta, fraction) in _ROPES.items():
        rope = rope_of({"rope_parameters": kinds[kind]}, theta)
        if rope["rope_type"] != rope_type or number(rope, "partial_rotary_factor", 1.0) != fraction:
            why = f"{kind} of the releases is {rope_type}, and turns {fraction:g} of it"
            raise unsupported(f"gemma4 with rope_parameters {shortened(kinds[kind])}", why)
        found[kind] = float(rope["rope_theta"])
    return found


def _experts(text: Mapping[str, Any]) -> dict[str, Any]:
    if not flag(text, "enable_moe_block", False):
        return {}
    agreed(text, ("moe_intermediate_size", "expert_intermediate_size"))
    return read_experts({**text, "num_experts_per_tok": text.get("top_k_experts")})


def _full_attention(text: Mapping[str, Any], dims: ModelDims, full: tuple[int, ...]) -> Attention:
    """Attention of the full layers. Transformers writes their sizes layer by layer from 5.15 on.

    Raises CkptkitError for another number of keys where these are not the values too: SGLang takes it, transformers
    the number of the other layers.
    """
    same, by_layer = flag(text, "attention_k_eq_v", False), text.get("per_layer_config")
    if by_layer is not None:
        text = {**text, **_written_by_layer(text, dims, by_layer, full)}
    if same and text.get("num_global_key_value_heads") is None:
        raise CkptkitError(
            "config.json has attention_k_eq_v and no 'num_global_key_value_heads'",
            "transformers cannot build this; compare with the release",
        )
    groups = integer(text, "num_global_key_value_heads", dims.groups)
    if not same and groups != dims.groups:
        why = "without attention_k_eq_v, transformers takes num_key_value_heads"
        raise unsupported(f"gemma4 with num_global_key_value_heads {groups}", why)
    size = integer(text, "global_head_dim", 0) or dims.head_dim
    return Attention(dims.heads, groups, size, full, values=not same)


def _written_by_layer(
    text: Mapping[str, Any], dims: ModelDims, by_layer: object, full: tuple[int, ...]
) -> dict[str, int]:
    """The sizes of full layers from `per_layer_config`, under the keys of earlier transformers.

    Raises CkptkitError for any but one size in all full layers, and where the keys are there too and say otherwise.
    """
    given = by_layer if isinstance(by_layer, Mapping) else {}
    sizes = next(iter(given.values()), None)
    is_number = all(str(layer).isdecimal() and len(layer) < 5 for layer in given)
    if not isinstance(sizes, Mapping) or not is_number or {int(layer) for layer in given} != set(full):
        why = f"it must give layers {list(full)}, the full ones, one size"
        raise unsupported(f"gemma4 with per_layer_config {shortened(by_layer)}", why)
    # No released model has other heads in full layers, and all have one size there.
    require(given, "gemma4.per_layer_config", dict.fromkeys(given, sizes), strict=True)
    require(sizes, "gemma4.per_layer_config", {"num_attention_heads": dims.heads})
    return {
        key: agreed({key: text.get(key), "per_layer_config": sizes.get(other)}, (key, "per_layer_config"), own)
        for key, other, own in (
            ("global_head_dim", "head_dim", dims.head_dim),
            ("num_global_key_value_heads", "num_key_value_heads", dims.groups),
        )
    }


def _engine_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """What SGLang reads and transformers leaves out.

    That is sizes of full layers from 5.15 on, and of the unified model that it has no embeddings of layers, which are
    SGLang's default. `config` is that of the language model, with the `model_type` of the whole.
    """
    found: dict[str, Any] = {"hidden_size_per_layer_input": 0} if config["model_type"] == "gemma4_unified" else {}
    full = read_dims({**found, **config, "model_type": "gemma4_text"}).other_attention
    if full is not None and config.get("per_layer_config") is not None:
        found |= {"global_head_dim": full.head_dim}
        found |= {} if full.values else {"num_global_key_value_heads": full.groups}
    return found


@dataclass(frozen=True)
class _Own:
    """Layers that attend to the keys and values of an earlier layer, and a second embedding.

    `stored`: keys and values of their own are stored, and used by nobody. `wide`: their MLP is twice as wide. Of the
    embedding, [vocab, all layers' features], each layer gets `size` features of its own; 0: there is none.
    """

    shared: tuple[int, ...]
    stored: bool
    wide: bool
    vocab: int
    size: int

    def __post_init__(self) -> None:
        require_positive(self, "size")


def _own(text: Mapping[str, Any], dims: ModelDims) -> _Own:
    """Raises CkptkitError where a layer has no earlier one of its kind to take keys from."""
    count, layers = integer(text, "num_kv_shared_layers", 0), dims.layers
    own = set(range(layers - count))
    kinds = [set(dims.window_layers), set(dims.all_layers) - set(dims.window_layers)]
    if count < 0 or not own or (count and any(kind and not kind & own for kind in kinds)):
        raise CkptkitError(
            f"config.json: num_kv_shared_layers is {count} of {layers} layers",
            "each kind of attention needs a layer with keys of its own; compare with the release",
        )
    return _Own(
        shared=tuple(range(layers - count, layers)),
        stored=_STORED in text,
        wide=flag(text, "use_double_wide_mlp", False),
        vocab=integer(text, "vocab_size_per_layer_input"),
        size=integer(text, "hidden_size_per_layer_input"),
    )


def _with_unused(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config whose rules have keys and values of layers that use another's.

    Releases of E2B and E4B store them; their QAT releases, and whatever transformers saves, do not.
    """
    if not read_dims(config).own.shared:
        return config
    if config["model_type"].endswith("_text"):
        return {**config, _STORED: True}
    return {**config, "text_config": {**config["text_config"], _STORED: True}}


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All tensors of the language model."""
    every, hidden = decoder(dims, dims.all_layers), dims.hidden
    norms = ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    wide = dims.own.shared if dims.own.wide else ()
    plain = tuple(layer for layer in dims.all_layers if layer not in set(wide))
    rules = [
        *embeddings(dims),
        *_attention(dims),
        *every.tensors({f"{norm}.weight": (hidden,) for norm in norms}),
        *gated_mlp(decoder(dims, plain), "", "mlp.", hidden, dims.ffn),
        *(gated_mlp(decoder(dims, wide), "", "mlp.", hidden, 2 * dims.ffn) if wide else ()),
        *(_expert_rules(dims) if dims.experts else ()),
        *(_layer_input_rules(dims) if dims.own.size else ()),
        *every.tensors({"layer_scalar": (1,)}),
    ]
    return unnamed(rules)


def _attention(dims: ModelDims) -> Iterator[ParamMapping]:
    """Layers with keys and values of their own, and those without; each of both sizes."""
    shared = set() if dims.own.stored else set(dims.own.shared)
    for one in dims.attentions:
        sizes = replace(dims, heads=one.heads, groups=one.groups, head_dim=one.head_dim)
        own = tuple(layer for layer in one.layers if layer not in shared)
        using = tuple(layer for layer in one.layers if layer in shared)
        for layers, left in ((own, () if one.values else ("v_proj.weight",)), (using, _KEYS)):
            rules = unnamed(attention(sizes, decoder(dims, layers))) if layers else ()
            yield from (rule for rule in rules if not rule.megatron.endswith(left))


def _expert_rules(dims: ModelDims) -> Iterator[ParamMapping]:
    at, hidden = decoder(dims, dims.all_layers), dims.hidden
    norms = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
    yield from at.tensors({"router.proj.weight": (dims.experts, hidden)}, kind="Router")
    yield from at.tensors({"router.scale": (hidden,), "router.per_expert_scale": (dims.experts,)})
    yield from gated_mlp(at, "", "experts.{expert}.", hidden, dims.expert_ffn)
    yield from at.tensors({f"{norm}.weight": (hidden,) for norm in norms})


def _layer_input_rules(dims: ModelDims) -> Iterator[ParamMapping]:
    at, root, hidden, size = decoder(dims, dims.all_layers), NamePrefix("", dims.root, None), dims.hidden, dims.own.size
    packed = dims.layers * size
    yield from root.tensors({"embed_tokens_per_layer.weight": (dims.own.vocab, packed)}, kind="Embedding")
    yield from root.tensors({"per_layer_model_projection.weight": (packed, hidden)})
    yield from root.tensors({"per_layer_projection_norm.weight": (size,)})
    sizes: dict[str, Shape] = {"per_layer_input_gate": (size, hidden), "per_layer_projection": (hidden, size)}
    sizes |= {"post_per_layer_input_norm": (hidden,)}
    yield from at.tensors({f"{name}.weight": shape for name, shape in sizes.items()})


_RELEASE = Release(
    classes={"Embedding": "Gemma4TextScaledWordEmbedding"},
    routers=(".router.proj",),
    kept=(".per_layer_input_gate", ".per_layer_projection", ".per_layer_model_projection"),
    partly_fused=True,
)
_UNIFIED_CLASSES = {"Embedding": "Gemma4UnifiedTextScaledWordEmbedding"}
_IN_ENGINES = (("experts", "moe.experts"),)
# Each layer of the vision tower clips what goes in and out of it; SGLang's joined layers do so themselves.
_JOINED = tuple((f".{name}_proj.linear", ".qkv_proj") for name in "qkv")
_JOINED += tuple((f".{name}_proj.linear", ".gate_up_proj") for name in ("gate", "up"))
_TEXT = ModelFamily(
    ("gemma4_text",),
    ("Gemma4ForCausalLM",),
    read_dims,
    mappings,
    with_unused=_with_unused,
    release=_RELEASE,
    engines={
        "sglang": EngineClass(QKV_GATE_UP, inside=_IN_ENGINES, keys=_engine_keys),
        "vllm": EngineClass(inside=_IN_ENGINES, wants_unused=True),
    },
    unwitnessed=Unwitnessed("megatron-core has no heads of two sizes, no scalars of layers and no softcap", None),
)
_TOWERS = ("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio.")
_WHOLE = replace(
    _TEXT,
    model_types=("gemma4",),
    architectures=("Gemma4ForConditionalGeneration",),
    carried=_TOWERS,
    tie=TieFlag(("transformers", "vLLM"), ("SGLang",), absent=True),
    release=replace(_RELEASE, root=NESTED_ROOT, nested=True),
    engines={**_TEXT.engines, "sglang": replace(_TEXT.engine("sglang"), outside=_JOINED)},
)
FAMILIES = (
    _TEXT,
    _WHOLE,
    replace(
        _TEXT,
        model_types=("gemma4_unified_text",),
        architectures=("Gemma4UnifiedForCausalLM",),
        release=replace(_RELEASE, classes=_UNIFIED_CLASSES),
    ),
    replace(
        _WHOLE,
        model_types=("gemma4_unified",),
        architectures=("Gemma4UnifiedForConditionalGeneration",),
        carried=("model.vision_embedder.", "model.embed_vision.", "model.embed_audio."),
        release=replace(_RELEASE, root=NESTED_ROOT, nested=True, classes=_UNIFIED_CLASSES),
        engines=_TEXT.engines,
    ),
)
