"""Kimi K3: three of four layers have Kimi delta attention (KDA), the others latent attention without rotary embedding.

Attention has an output gate. Experts work in a smaller size, behind a norm of its own, and residuals are aggregated
over blocks of layers by learned weights. The release has its experts in MXFP4 and a vision tower. No released
transformers has a class of it: config and names are those of the release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.converters.blocks.decoder import W1_W3_W2, embeddings, gated_mlp
from ckptkit.converters.blocks.latent_attention import read_mla
from ckptkit.converters.blocks.sigmoid_moe import read_sigmoid_moe
from ckptkit.converters.config.dims import Kda, ModelDims, base_dims, first_layers
from ckptkit.converters.config.values import integer, require, rope_of, text_config_of, unsupported, wrong
from ckptkit.converters.family import MegatronGap, ModelFamily
from ckptkit.converters.ops.basic import Copy, Op, ZeroPadded
from ckptkit.converters.ops.shapes import Shape
from ckptkit.converters.rules import ParamMapping, decoder
from ckptkit.core.errors import CkptkitError


def kda(dims: ModelDims, *, full_gate: bool, padding: int = 0) -> tuple[ParamMapping, ...]:
    """All attention tensors of a KDA layer.

    `full_gate`: its output gate is one projection, not two with a head's size between them. `padding`: zeros behind the
    heads' values in HF's `A_log`.
    """
    net, at = dims.kda, decoder(dims, dims.mixers)
    assert net is not None, "a family without KDA has no such rules"
    width, hidden = net.heads * net.head_dim, dims.hidden
    whole, low_ranks = ("qkvg", "f") if full_gate else ("qkv", "fg")
    projections = {
        **{f"{x}_proj": (width, hidden) for x in whole},
        **{f"{x}_b_proj": (width, net.head_dim) for x in low_ranks},
        "b_proj": (net.heads, hidden),
    }

    def rule(name: str, shape: Shape, op: Op, *, kind: str = "Linear", fp32: bool = False) -> ParamMapping:
        return at.rule(f"self_attention.{name}", {f"self_attn.{name}": shape}, op, fp32=fp32, kind=kind)

    return (
        *(rule(f"{name}.weight", shape, Copy(0)) for name, shape in projections.items()),
        *(rule(f"{x}_a_proj.weight", (net.head_dim, hidden), Copy()) for x in low_ranks),
        rule("o_proj.weight", (hidden, width), Copy(1)),
        rule("o_norm.weight", (net.head_dim,), Copy()),
        *(rule(f"{x}_conv1d.weight", (width, 1, net.kernel), Copy(0), fp32=True, kind="Conv1d") for x in "qkv"),
        rule("dt_bias", (width,), Copy(0), fp32=True),
        rule("A_log", (net.heads + padding,), ZeroPadded(net.heads, padding), fp32=True),
    )


# The release stores `A_log` of its 96 heads for 128; how it would pad another number is not published.
_HEADS, _STORED = 96, 128
# Values in the release, which the rules and Megatron-Bridge's layers require.
_FIXED: Mapping[str, Any] = {
    "hidden_act": "situ",
    "latent_moe_use_norm": True,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "model_type": "kimi_linear",
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "use_grouped_topk": True,
}
# DeepSeek's names of keys that differ in this config.
_DEEPSEEK = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
}


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of the language model of a kimi_k3 config. Source: the release's own config.json.

    Raises CkptkitError for features that the release does not have.
    """
    text = text_config_of(config)
    require({**dict.fromkeys(_FIXED), **text}, "kimi_k3", _FIXED, strict=True)
    require(config, "kimi_k3", {"tie_word_embeddings": False})
    if rope_of(text)["rope_type"] != "default":
        raise unsupported("kimi_k3 with rope_scaling", "the release has none")
    net, layers = _linear_attention(text)
    mla = read_mla(text)
    if mla.q_rank is None:
        raise unsupported("kimi_k3 with q_lora_rank null", "the release has q_lora_rank 1536")
    known = {name: text[key] for name, key in _DEEPSEEK.items() if key in text}
    if integer(text, "attn_res_block_size") < 1:
        raise wrong("attn_res_block_size", text["attn_res_block_size"], "positive")
    sizes = {key: value for key, value in text.items() if key != "hidden_act"}
    return base_dims(
        sizes,
        tied=False,
        root="language_model.model.",
        head="language_model.lm_head.weight",
        rotary=False,
        mla=mla,
        kda=net,
        mixer_layers=layers,
        dense_layers=first_layers(text, "first_k_dense_replace", 0),
        expert_hidden=integer(text, "routed_expert_hidden_size"),
        **read_sigmoid_moe({**text, **known}, absent={}),
    )


def _linear_attention(text: Mapping[str, Any]) -> tuple[Kda, tuple[int, ...]]:
    """Sizes of KDA, and its layers from 0. The config counts them from 1.

    Raises CkptkitError unless its two lists together contain each layer once.
    """
    given, count = text.get("linear_attn_config"), integer(text, "num_hidden_layers")
    if not isinstance(given, dict):
        raise CkptkitError("config.json: kimi_k3 has no linear_attn_config", "restore config.json from the release")
    lists = [given.get(key) for key in ("kda_layers", "full_attn_layers")]
    stated = [layer for one in lists if isinstance(one, list) for layer in one]
    if len(stated) != count or any(type(layer) is not int for layer in stated) or {*stated} != {*range(1, count + 1)}:
        message = f"config.json: kda_layers and full_attn_layers together do not have each layer from 1 to {count} once"
        raise CkptkitError(message, "compare both with the release")
    known = {"num_heads": _HEADS, "use_full_rank_gate": True}
    require({**dict.fromkeys(known), **given}, "kimi_k3.linear_attn_config", known, strict=True)
    net = Kda(_HEADS, integer(given, "head_dim"), integer(given, "short_conv_kernel_size"))
    return net, tuple(layer - 1 for layer in sorted(given["kda_layers"]))


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of the model. Megatron's names: Megatron-Bridge's `models/kimi/kimi_k3_bridge.py` at 067f987."""
    every, hidden = decoder(dims, dims.all_layers), dims.hidden
    norm, score, last = (hidden,), (1, hidden), f"decoder.layers.{dims.layers - 1}."
    residuals: dict[str, Shape] = {"self_attention_res_norm": norm, "self_attention_res_proj": score}
    residuals |= {"mlp_res_norm": norm, "mlp_res_proj": score}
    output: dict[str, Shape] = {"output_attn_res_norm": norm, "output_attn_res_proj": score}
    return (
        *embeddings(dims),
        *(ParamMapping(f"{last}{name}.weight", {f"{dims.root}{name}.weight": shape}) for name, shape in output.items()),
        every.rule("input_layernorm.weight", {"input_layernorm.weight": norm}),
        every.rule("pre_mlp_layernorm.weight", {"post_attention_layernorm.weight": norm}),
        *(every.rule(f"{name}.weight", {f"{name}.weight": shape}) for name, shape in residuals.items()),
        *kda(dims, full_gate=True, padding=_STORED - _HEADS),
        *_latent_attention(dims),
        *gated_mlp(decoder(dims, dims.dense), "mlp.", "mlp.", hidden, dims.ffn),
        *_experts(dims),
    )


def _latent_attention(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """Latent attention with an output gate, under HF's names on both sides."""
    mla, at, hidden = dims.mla, decoder(dims, dims.softmax_layers), dims.hidden
    assert mla is not None, "read_dims sets it"
    values = dims.heads * mla.value
    parts: dict[str, tuple[Shape, int | None]] = {
        "q_a_proj": ((mla.q_rank or 0, hidden), None),
        "q_a_layernorm": ((mla.q_rank or 0,), None),
        "q_b_proj": ((dims.heads * (mla.nope + mla.rope), mla.q_rank or 0), 0),
        "kv_a_proj_with_mqa": ((mla.kv_rank + mla.rope, hidden), None),
        "kv_a_layernorm": ((mla.kv_rank,), None),
        "kv_b_proj": ((dims.heads * (mla.nope + mla.value), mla.kv_rank), 0),
        "g_proj": ((values, hidden), 0),
        "o_proj": ((hidden, values), 1),
    }
    return tuple(
        at.rule(f"self_attention.{name}.weight", {f"self_attn.{name}.weight": shape}, Copy(axis))
        for name, (shape, axis) in parts.items()
    )


def _experts(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """Experts in a smaller size between two projections, with a norm before the second; router and shared experts."""
    at, hidden, inner, block = decoder(dims, dims.moe), dims.hidden, dims.expert_hidden or 0, "block_sparse_moe."
    around = {
        "fc1_latent_proj": ("routed_expert_down_proj", (inner, hidden)),
        "routed_expert_norm": ("routed_expert_norm", (inner,)),
        "fc2_latent_proj": ("routed_expert_up_proj", (hidden, inner)),
    }
    experts = "mlp.experts.experts.{expert}."
    return (
        at.rule("mlp.router.weight", {f"{block}gate.weight": (dims.experts, hidden)}, kind="Router"),
        at.rule("mlp.router.expert_bias", {f"{block}gate.e_score_correction_bias": (dims.experts,)}, fp32=True),
        *(at.rule(f"mlp.{name}.weight", {f"{block}{hf}.weight": shape}) for name, (hf, shape) in around.items()),
        *gated_mlp(at, experts, block + "experts.{expert}.", inner, dims.expert_ffn, W1_W3_W2),
        *gated_mlp(at, "mlp.shared_experts.", f"{block}shared_experts.", hidden, dims.shared_ffn),
    )


FAMILIES = (
    ModelFamily(
        ("kimi_k3",),
        ("KimiK3ForConditionalGeneration",),
        read_dims,
        mappings,
        passthrough=("vision_tower.", "mm_projector."),
        # No class of transformers says which of its modules are Linear layers.
        release=None,
        unwitnessed=MegatronGap(
            "Megatron lacks its delta attention, aggregated residuals and activation", "Megatron-Bridge"
        ),
    ),
)
