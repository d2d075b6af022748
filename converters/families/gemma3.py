"""The language model of Gemma 3 (270M to 27B): four norms per layer, all stored minus one.

Five layers with a sliding window, then a full one. The vision tower of the larger releases is passed through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptkit.converters.blocks.decoder import attention, embeddings, gated_mlp
from ckptkit.converters.config.dims import ModelDims, base_dims
from ckptkit.converters.config.values import (
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
from ckptkit.converters.family import ModelFamily, Release
from ckptkit.converters.rules import ParamMapping, decoder

# Defaults of transformers' `Gemma3TextConfig` that releases with a vision tower omit in their text_config.
_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
}
_KINDS = ("full_attention", "sliding_attention")
_ONLY = {
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": False,
}


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a gemma3 or gemma3_text config. Source: transformers `Gemma3TextConfig`, `Gemma3TextModel`."""
    nested = config["model_type"] == "gemma3"
    given = text_config_of(config) if nested else config
    text = _DEFAULTS | {key: value for key, value in given.items() if value is not None}
    require(text, "gemma3", _ONLY, "Megatron's attention and MLP would compute another model")
    full, local_theta = _ropes(text)
    scalar = number(text, "query_pre_attn_scalar", 256)
    if scalar <= 0:
        raise wrong("query_pre_attn_scalar", scalar, "a positive number")
    return base_dims(
        {**text, "rope_parameters": full, "rope_theta": None, "rope_scaling": None},
        qk_norm=True,
        activation="gelu_pytorch_tanh",
        tied=flag(config, "tie_word_embeddings", True),
        root=_NESTED.root if nested else "model.",
        head=f"{_NESTED.head}.weight" if nested else "lm_head.weight",
        norm_offset=True,
        sandwich="linear",
        window=window_of(text, absent=4096),
        window_layers=sliding_layers(text, integer(text, "sliding_window_pattern", 6)),
        local_rope_theta=local_theta,
        attention_scale=scalar**-0.5,
        embedding_scale=integer(text, "hidden_size") ** 0.5,
    )


def _ropes(text: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Rotary settings of the full layers, and the base of those with a window.

    Transformers v5 has one object for each kind.
    """
    kinds = text.get("rope_parameters") or {}
    if not isinstance(kinds, dict) or any(
        value not in (None, "default") for kind, value in kinds.items() if kind not in _KINDS
    ):
        raise wrong("rope_parameters", kinds, f"an object with {' and '.join(_KINDS)}")
    full = rope_of({**text, "rope_parameters": kinds.get(_KINDS[0])}, 1_000_000.0)
    local = rope_of({"rope_parameters": kinds.get(_KINDS[1]), "rope_theta": text.get("rope_local_base_freq")}, 10_000.0)
    if full["rope_type"] not in ("default", "linear") or local["rope_type"] != "default":
        raise unsupported(
            f"gemma3 with rope {full['rope_type']!r} in full and {local['rope_type']!r} in sliding-window layers",
            "Megatron-Bridge's model only has the releases' rope: linear in full, default in sliding-window layers",
        )
    if full["rope_type"] == "linear":
        number(full, "factor")  # raises if it is missing
    return full, local["rope_theta"]


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of a gemma3 model. The norms after attention and MLP have the names of Megatron-Bridge's modules."""
    at, norm = decoder(dims, dims.all_layers), (dims.hidden,)
    return (
        *embeddings(dims),
        *attention(dims),
        at.rule("self_attention.linear_proj.post_layernorm.weight", {"post_attention_layernorm.weight": norm}),
        at.rule("mlp.linear_fc1.layer_norm_weight", {"pre_feedforward_layernorm.weight": norm}),
        *gated_mlp(at, "mlp.", "mlp.", dims.hidden, dims.ffn),
        at.rule("mlp.linear_fc2.post_layernorm.weight", {"post_feedforward_layernorm.weight": norm}),
    )


def _linears_outside(config: Mapping[str, Any]) -> Iterator[str]:
    """The Linear layers of the vision tower, as transformers up to 4.57 and since then spell them.

    Source: its `SiglipVisionModel`.
    """
    vision = config["vision_config"]
    modules = ["head.attention.out_proj", "head.mlp.fc1", "head.mlp.fc2"] * flag(vision, "vision_use_head", True)
    for layer in range(integer(vision, "num_hidden_layers", 12)):
        names = (*(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")), "mlp.fc1", "mlp.fc2")
        modules += [f"encoder.layers.{layer}.{name}" for name in names]
    for root in ("vision_tower.", "vision_tower.vision_model."):
        yield from (f"{prefix}{root}{module}" for prefix in ("", "model.") for module in modules)


_CLASSES = {"Embedding": "Gemma3TextScaledWordEmbedding"}
_NESTED = Release(
    "language_model.model.",
    "language_model.lm_head",
    nested=True,
    linears_outside=_linears_outside,
    model_type="gemma3_text",
    classes=_CLASSES,
)
_TEXT = ModelFamily(
    ("gemma3_text",),
    ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    read_dims,
    mappings,
    passthrough=("vision_tower.", "multi_modal_projector."),
    release=Release(classes=_CLASSES),
)
FAMILIES = (
    _TEXT,
    replace(
        _TEXT,
        model_types=("gemma3",),
        architectures=_TEXT.architectures[::-1],
        release=_NESTED,
    ),
)
