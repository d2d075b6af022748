"""Step-3.5-Flash, and Step-3.7-Flash with a vision tower: more heads in layers with a window, a gate for each head.

Norms are stored minus one. All experts of a layer lie in one tensor a projection. Multi-token prediction layers are
dense, and each has an output layer of its own.

No released megatron-core has such layers. Megatron-Bridge has one output layer for all, and writes that of the model in
the place of the others, so its names cannot hold a release.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from converters.blocks.decoder import attention, embeddings, gated_mlp, layer_count
from converters.config.dims import Attention, ModelDims, base_dims
from converters.config.values import (
    integer,
    kinds_of_layers,
    number,
    places,
    require,
    text_config_of,
    unsupported,
    window_of,
    wrong,
)
from converters.family import Draft, EngineClass, ModelFamily, Release, Unwitnessed
from converters.ops.basic import Copy
from converters.ops.shapes import Shape
from converters.rules import NamePrefix, ParamMapping, decoder, unnamed

_FULL, _SLIDING = "full_attention", "sliding_attention"
# What every release says or leaves out, and nobody computes otherwise.
_ONLY: Mapping[str, Any] = {
    "att_impl_type": "GQA",
    "moe_router_activation": "sigmoid",
    "need_fp32_gate": True,
    "norm_expert_weight": True,
    "sink": False,
    "use_head_wise_attn_gate": True,
    "use_moe_router_bias": True,
    "use_qk_norm": True,
    "zero_centered": True,
}
_STACKED = ("moe.gate_proj", "moe.up_proj", "moe.down_proj")
_OTHER = "attention_other_setting"


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a step3p5 or step3p7 config. Source: SGLang 0.5.16 and vLLM 0.26.0 `models/step3p5.py`.

    Raises CkptkitError for what they do not compute, and for the spelling of transformers, which they do not read.
    """
    text = text_config_of(config) if config["model_type"] == "step3p7" else config
    require(text, "step3p5", _ONLY, strict=True)
    # SGLang wants an output layer of its own.
    require(config, "step3p5", {"tie_word_embeddings": False})
    if text.get("use_rope_layers"):
        raise unsupported("step3p5 with use_rope_layers", "every layer of the releases has rope")
    layers, mtp = integer(text, "num_hidden_layers"), integer(text, "num_nextn_predict_layers", 0)
    kinds = _kinds(text, layers, mtp)
    theta = _numbers(text, "rope_theta", layers)
    fractions = _numbers(text, "partial_rotary_factors", layers)
    for key in ("swiglu_limits", "swiglu_limits_shared"):
        _numbers(text, key, layers)
    experts, sparse = _experts(text, layers)
    full = kinds.index(_FULL) if _FULL in kinds else 0
    dims = base_dims(
        {
            "rms_norm_eps": 1e-5,
            **text,
            "num_key_value_heads": integer(text, "num_attention_groups"),
            "rope_theta": theta[full],
            "rope_scaling": None,
            "partial_rotary_factor": fractions[full],
        },
        qk_norm=True,
        norm_offset=True,
        tied=False,
        window=window_of(text),
        window_layers=places(kinds[:layers], _SLIDING),
        dense_layers=tuple(layer for layer in range(layers) if layer not in sparse),
        router_sigmoid=True,
        router_bias=True,
        mtp_layers=mtp,
        **experts,
    )
    return replace(dims, other_attention=_sliding_attention(text, dims, kinds))


def _kinds(text: Mapping[str, Any], layers: int, mtp: int) -> list[str]:
    """The kind of attention of each layer, and of multi-token prediction layers after them."""
    kinds = text.get("layer_types")
    cut = kinds[: layers + mtp] if isinstance(kinds, list) else kinds or ()
    every = {"num_hidden_layers": layers + mtp, "layer_types": cut}
    return kinds_of_layers(every, "layer_types", (_FULL, _SLIDING)) or []


def _numbers(text: Mapping[str, Any], key: str, layers: int) -> list[float]:
    """A number for each layer; engines look up the layer's own."""
    values = text.get(key)
    if not isinstance(values, list) or len(values) < layers:
        raise wrong(key, values, f"a list of numbers for {layers} layers")
    return [number({key: value}, key) for value in values]


def _experts(text: Mapping[str, Any], layers: int) -> tuple[dict[str, Any], frozenset[int]]:
    """Sizes of experts, and the layers that have them, which engines read of one string."""
    stated = text.get("moe_layers_enum")
    listed = [one.strip() for one in stated.split(",")] if isinstance(stated, str) else []
    if not listed or not all(one.isdecimal() and len(one) < 5 for one in listed):
        raise wrong("moe_layers_enum", stated, "a string of layers with commas between")
    sparse = frozenset(map(int, listed))
    if max(sparse) >= layers:
        raise wrong("moe_layers_enum", stated, f"layers below {layers}")
    return {
        "experts": integer(text, "moe_num_experts"),
        "top_k": integer(text, "moe_top_k"),
        "expert_ffn": integer(text, "moe_intermediate_size"),
        "shared_ffn": integer(text, "share_expert_dim"),
        "router_scale": number(text, "moe_router_scaling_factor", 1.0),
    }, sparse


def _sliding_attention(text: Mapping[str, Any], dims: ModelDims, kinds: list[str]) -> Attention | None:
    if not (layers := places(kinds, _SLIDING)):
        return None
    other = text.get(_OTHER)
    if not isinstance(other, Mapping):
        why = "transformers writes its heads under other keys, which engines do not read; take it from the release"
        raise unsupported(f"step3p5 without {_OTHER}", why)
    # Engines take head_dim for every layer.
    require(other, f"step3p5.{_OTHER}", {"attention_type": _SLIDING, "head_dim": dims.head_dim}, strict=True)
    return Attention(
        integer(other, "num_attention_heads"), integer(other, "num_attention_groups"), dims.head_dim, layers
    )


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All tensors of the language model."""
    hidden, rules = dims.hidden, [*embeddings(dims)]
    other = dims.other_attention
    drafts = range(dims.layers, dims.layers + dims.mtp_layers)
    for one in dims.attentions:
        if layers := tuple(layer for layer in one.layers if layer < dims.layers):
            rules += _attention(dims, one, decoder(dims, layers))
    for layers in (dims.dense, dims.moe):
        at = decoder(dims, layers)
        rules.append(at.rule("", {"post_attention_layernorm.weight": (hidden,)}))
    rules += gated_mlp(decoder(dims, dims.dense), "", "mlp.", hidden, dims.ffn)
    rules += _expert_rules(dims)
    for layer in drafts:
        sliding = other is not None and layer in other.layers
        rules += _draft(dims, dims.attentions[sliding], layer)
    return unnamed(rules)


def _attention(dims: ModelDims, one: Attention, at: NamePrefix) -> Iterator[ParamMapping]:
    """Attention with the norm before it, and a gate for each head."""
    yield from attention(replace(dims, heads=one.heads, groups=one.groups, head_dim=one.head_dim), at)
    yield at.rule("self_attention.gate", {"self_attn.g_proj.weight": (one.heads, dims.hidden)}, Copy(0))


def _expert_rules(dims: ModelDims) -> Iterator[ParamMapping]:
    at, hidden, ffn = decoder(dims, dims.moe), dims.hidden, dims.expert_ffn
    yield from at.tensors({"moe.gate.weight": (dims.experts, hidden)}, kind="Router")
    yield from at.tensors({"moe.router_bias": (dims.experts,)}, fp32=True)
    shapes = zip(_STACKED, ((ffn, hidden), (ffn, hidden), (hidden, ffn)), strict=True)
    yield from at.tensors({f"{name}.weight": (dims.experts, *shape) for name, shape in shapes}, kind="Experts")
    yield from gated_mlp(at, "", "share_expert.", hidden, dims.shared_ffn)


def _draft(dims: ModelDims, one: Attention, layer: int) -> Iterator[ParamMapping]:
    """A multi-token prediction layer, numbered after the decoder layers."""
    at, hidden = NamePrefix("mtp.", f"{dims.root}layers.{layer}.", None), dims.hidden
    yield from at.tensors(
        {"enorm.weight": (hidden,), "hnorm.weight": (hidden,), "eh_proj.weight": (hidden, 2 * hidden)}
    )
    yield from _attention(dims, one, at)
    yield from at.tensors({"post_attention_layernorm.weight": (hidden,)})
    yield from gated_mlp(at, "", "mlp.", hidden, dims.ffn)
    head: dict[str, Shape] = {"norm": (hidden,), "output": (dims.vocab, hidden)}
    yield from at.tensors({f"transformer.shared_head.{name}.weight": shape for name, shape in head.items()})


def _drafts(text: Mapping[str, Any], root: str) -> tuple[Draft, ...]:
    """The multi-token prediction layers, numbered after the decoder layers; a dense layer is like them."""
    first, count = layer_count(text, "num_hidden_layers"), layer_count(text, "num_nextn_predict_layers")
    own = [f"{root}layers.{layer}." for layer in range(first, first + count)]
    return tuple(
        Draft(at, "model.mtp_block.", rf"re:(.*\.)?(layers\.{first + depth}|mtp_block)\..*", at, f"{at}eh_proj", like=0)
        for depth, at in enumerate(own)
    )


_RELEASE = Release(drafts=_drafts, own_tree=True, stacked=_STACKED, kept=(".self_attn.g_proj",))
_IN_SGLANG = (("moe", "mlp"),)
_ROOT = ("model.", "language_model.model.")
# SGLang looks for the names of releases in NVFP4.
_ENTRIES = (
    ("model.language_model.", "language_model.model."),
    *((f"model.{tower}", tower) for tower in ("vision_model", "vit_large_projector")),
)
_IN_VLLM = (("share_expert", "moe.share_expert"),)
_TEXT = ModelFamily(
    ("step3p5",),
    ("Step3p5ForCausalLM",),
    read_dims,
    mappings,
    release=_RELEASE,
    engines={"sglang": EngineClass(inside=_IN_SGLANG), "vllm": EngineClass(inside=_IN_VLLM)},
    unwitnessed=Unwitnessed("megatron-core has neither heads nor rotary settings by layer, nor a gate a head", None),
)
FAMILIES = (
    _TEXT,
    replace(
        _TEXT,
        model_types=("step3p7",),
        architectures=("Step3p7ForConditionalGeneration",),
        carried=("vision_model.", "vit_large_projector."),
        release=replace(_RELEASE, nested=True),
        engines={
            "sglang": EngineClass(root=_ROOT, entries=_ENTRIES, inside=_IN_SGLANG),
            "vllm": EngineClass(inside=_IN_VLLM),
        },
    ),
)
