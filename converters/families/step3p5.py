"""Step-3.5-Flash, and Step-3.7-Flash with a vision tower: more heads in layers with a window, a gate for each head.

Norms are stored minus one. All experts of a layer are in one tensor per projection. Multi-token prediction layers are
dense, and each has a separate output layer.

No released megatron-core has such layers. Megatron-Bridge has one output layer for all, and writes the model's instead
of the others, so its names cannot represent a release.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.converters.blocks.decoder import attention, embeddings, gated_mlp, layer_count
from ckptkit.converters.config.dims import ModelDims, base_dims
from ckptkit.converters.config.values import integer, kinds_of_layers, places, text_config_of, wrong
from ckptkit.converters.family import Draft, MegatronGap, ModelFamily, Release
from ckptkit.converters.ops.basic import Copy
from ckptkit.converters.ops.shapes import Shape
from ckptkit.converters.rules import NamePrefix, ParamMapping, decoder, with_hf_names

_FULL, _SLIDING = "full_attention", "sliding_attention"
_STACKED = ("moe.gate_proj", "moe.up_proj", "moe.down_proj")


@dataclass(frozen=True)
class _Heads:
    """Attention heads and key-value heads of some layers, those for multi-token prediction included."""

    heads: int
    groups: int
    layers: tuple[int, ...]


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a step3p5 or step3p7 config. Source: SGLang 0.5.16 and vLLM 0.26.0 `models/step3p5.py`."""
    text = text_config_of(config) if config["model_type"] == "step3p7" else config
    layers, mtp = integer(text, "num_hidden_layers"), integer(text, "num_nextn_predict_layers", 0)
    stated, enumerated = text.get("layer_types"), text.get("moe_layers_enum")
    cut = stated[: layers + mtp] if isinstance(stated, list) else ()
    every = {"num_hidden_layers": layers + mtp, "layer_types": cut}
    kinds = kinds_of_layers(every, "layer_types", (_FULL, _SLIDING)) or []
    if not isinstance(enumerated, str) or not re.fullmatch(r"\s*\d{1,4}(\s*,\s*\d{1,4})*\s*", enumerated):
        raise wrong("moe_layers_enum", enumerated, "a string of layer numbers with commas")
    sparse, other = set(map(int, enumerated.split(","))), text.get("attention_other_setting")
    if not isinstance(other, Mapping):
        raise wrong("attention_other_setting", other, "an object")
    full, sliding = (places(kinds, kind) for kind in (_FULL, _SLIDING))
    groups = integer(text, "num_attention_groups")
    plain = {"rope_theta": 10000.0, "rope_scaling": None, "partial_rotary_factor": 1.0, "num_key_value_heads": groups}
    return base_dims(
        {"rms_norm_eps": 1e-5, **text, **plain},
        qk_norm=True,
        norm_offset=True,
        tied=False,
        dense_layers=tuple(layer for layer in range(layers) if layer not in sparse),
        router_sigmoid=True,
        router_bias=True,
        mtp_layers=mtp,
        experts=integer(text, "moe_num_experts"),
        top_k=integer(text, "moe_top_k"),
        expert_ffn=integer(text, "moe_intermediate_size"),
        shared_ffn=integer(text, "share_expert_dim"),
        own=(
            _Heads(integer(text, "num_attention_heads"), groups, full),
            _Heads(integer(other, "num_attention_heads"), integer(other, "num_attention_groups"), sliding),
        ),
    )


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    rules = [*embeddings(dims)]
    for one in dims.own:
        if layers := tuple(layer for layer in one.layers if layer < dims.layers):
            rules += _attention(dims, one, decoder(dims, layers))
    for layers in (dims.dense, dims.moe):
        rules.append(decoder(dims, layers).rule("", {"post_attention_layernorm.weight": (dims.hidden,)}))
    rules += gated_mlp(decoder(dims, dims.dense), "", "mlp.", dims.hidden, dims.ffn)
    rules += _expert_rules(dims)
    for one in dims.own:
        for layer in one.layers:
            rules += _draft(dims, one, layer) if layer >= dims.layers else ()
    return with_hf_names(rules)


def _attention(dims: ModelDims, one: _Heads, at: NamePrefix) -> Iterator[ParamMapping]:
    """Attention with the norm before it, and a gate for each head."""
    yield from attention(replace(dims, heads=one.heads, groups=one.groups), at)
    yield at.rule("self_attention.gate", {"self_attn.g_proj.weight": (one.heads, dims.hidden)}, Copy(0))


def _expert_rules(dims: ModelDims) -> Iterator[ParamMapping]:
    at, hidden, ffn = decoder(dims, dims.moe), dims.hidden, dims.expert_ffn
    yield from at.tensors({"moe.gate.weight": (dims.experts, hidden)}, kind="Router")
    yield from at.tensors({"moe.router_bias": (dims.experts,)}, fp32=True)
    shapes = zip(_STACKED, ((ffn, hidden), (ffn, hidden), (hidden, ffn)), strict=True)
    yield from at.tensors({f"{name}.weight": (dims.experts, *shape) for name, shape in shapes}, kind="Experts")
    yield from gated_mlp(at, "", "share_expert.", hidden, dims.shared_ffn)


def _draft(dims: ModelDims, one: _Heads, layer: int) -> Iterator[ParamMapping]:
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
_TEXT = ModelFamily(
    ("step3p5",),
    ("Step3p5ForCausalLM",),
    read_dims,
    mappings,
    release=_RELEASE,
    unwitnessed=MegatronGap("megatron-core has no heads or rotary settings per layer, and no gate per head", None),
)
FAMILIES = (
    _TEXT,
    replace(
        _TEXT,
        model_types=("step3p7",),
        architectures=("Step3p7ForConditionalGeneration",),
        passthrough=("vision_model.", "vit_large_projector."),
        release=replace(_RELEASE, nested=True),
    ),
)
