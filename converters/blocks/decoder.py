"""Rules of ordinary decoder layers, with the Megatron names of the Transformer Engine spec."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ckptkit.converters.config.dims import ModelDims
from ckptkit.converters.family import Draft
from ckptkit.converters.hf_names import GATE_UP_DOWN, QKV
from ckptkit.converters.ops.basic import Copy, GatedQkv, GateUp, GateUpInOne, Op, Qkv, QkvInOne
from ckptkit.converters.rules import NamePrefix, ParamMapping, decoder

# Mixtral's names for an expert's gate, up and down projection.
W1_W3_W2 = ("w1", "w3", "w2")
# Some releases store these in each layer (Moonlight, Kimi K2, saves by transformers before 4.32), but every engine
# computes them.
ROTARY_FREQUENCIES = (".self_attn.rotary_emb.inv_freq",)


def embeddings(
    dims: ModelDims,
    *,
    name: str = "embed_tokens",
    norm: tuple[str, str] = ("decoder.final_layernorm", "norm"),
    embed_copies: tuple[str, ...] = (),
    head_copies: tuple[str, ...] = (),
) -> tuple[ParamMapping, ...]:
    """Token embedding, final norm, and the output layer unless it is tied to the embedding.

    `name`: the embedding's HF module; `norm`: Megatron's and HF's module of the norm. The copies are further tensors
    in which a release may repeat embedding and output layer.
    """
    table = (dims.vocab, dims.hidden)
    # Some releases of tied models store the output layer anyway.
    embed_copies += (dims.head, *head_copies) if dims.tied else ()
    head = ParamMapping("output_layer.weight", {dims.head: table}, Copy(0), vocab=True, copies=head_copies)
    return (
        ParamMapping(
            "embedding.word_embeddings.weight",
            {f"{dims.root}{name}.weight": table},
            Copy(0),
            vocab=True,
            copies=embed_copies,
            kind="Embedding",
        ),
        ParamMapping(f"{norm[0]}.weight", {f"{dims.root}{norm[1]}.weight": (dims.hidden,)}),
        *((head,) if not dims.tied else ()),
    )


def attention(
    dims: ModelDims,
    at: NamePrefix | None = None,
    *,
    norm: str = "input_layernorm",
    block: str = "self_attn.",
    joined: str = "",
    out: str = "o_proj",
    head_norms: tuple[str, str] = ("q_norm", "k_norm"),
) -> tuple[ParamMapping, ...]:
    """Pre-norm grouped-query attention, with optional biases, q/k norms per head, and an output gate from q_proj.

    HF names: `norm` before it, `block`, `joined` for one matrix with queries, keys and values, `out` projection.
    """
    at = at or decoder(dims, dims.softmax_layers)
    width, groups = dims.heads * dims.head_dim, dims.groups * dims.head_dim
    rows = dict(zip(QKV, (2 * width if dims.attention_gate else width, groups, groups), strict=True))
    kind = QkvInOne if joined else GatedQkv if dims.attention_gate else Qkv
    qkv, parts = kind(dims.heads, dims.groups, dims.head_dim), {joined: sum(rows.values())} if joined else rows
    weights = {f"{block}{part}.weight": (count, dims.hidden) for part, count in parts.items()}
    rules = [
        at.rule("self_attention.linear_qkv.layer_norm_weight", {f"{norm}.weight": (dims.hidden,)}),
        at.rule("self_attention.linear_qkv.weight", weights, qkv),
        at.rule("self_attention.linear_proj.weight", {f"{block}{out}.weight": (dims.hidden, width)}, Copy(1)),
    ]
    if dims.qkv_bias:
        biases = {f"{block}{part}.bias": (count,) for part, count in parts.items()}
        rules.append(at.rule("self_attention.linear_qkv.bias", biases, qkv))
    if dims.out_bias:
        rules.append(at.rule("self_attention.linear_proj.bias", {f"{block}{out}.bias": (dims.hidden,)}))
    if dims.qk_norm and not dims.qk_norm_full:
        for x, name in zip("qk", head_norms, strict=True):
            rules.append(at.rule(f"self_attention.{x}_layernorm.weight", {f"{block}{name}.weight": (dims.head_dim,)}))
    return tuple(rules)


def full_qk_norms(dims: ModelDims, norm: str = "{}_layernorm", axis: int | None = 0) -> tuple[ParamMapping, ...]:
    """Norms of queries and keys over all heads at once, called `norm` and sharded along `axis`."""
    at, heads = decoder(dims, dims.all_layers), {"q": dims.heads, "k": dims.groups}
    return tuple(
        at.rule(
            f"self_attention.{norm.format(x)}.weight",
            {f"self_attn.{x}_norm.weight": (count * dims.head_dim,)},
            Copy(axis),
        )
        for x, count in heads.items()
    )


def gated_mlp(
    at: NamePrefix, megatron: str, hf: str, hidden: int, ffn: int, names: tuple[str, str, str] = GATE_UP_DOWN
) -> tuple[ParamMapping, ...]:
    """A SwiGLU block: gate and up projection into linear_fc1, down projection into linear_fc2."""
    gate, up, down = (f"{hf}{name}.weight" for name in names)
    return (
        at.rule(megatron + "linear_fc1.weight", {gate: (ffn, hidden), up: (ffn, hidden)}, GateUp()),
        at.rule(megatron + "linear_fc2.weight", {down: (hidden, ffn)}, Copy(1)),
    )


def mlp_in_one(dims: ModelDims, at: NamePrefix) -> tuple[ParamMapping, ...]:
    """A SwiGLU block with the preceding norm and one matrix for gate and up projection."""
    return (
        at.rule("mlp.linear_fc1.layer_norm_weight", {"post_attention_layernorm.weight": (dims.hidden,)}),
        at.rule("mlp.linear_fc1.weight", {"mlp.gate_up_proj.weight": (2 * dims.ffn, dims.hidden)}, GateUpInOne()),
        at.rule("mlp.linear_fc2.weight", {"mlp.down_proj.weight": (dims.hidden, dims.ffn)}, Copy(1)),
    )


def dense_mlp(dims: ModelDims, at: NamePrefix | None = None) -> tuple[ParamMapping, ...]:
    """The MLP of the dense layers with the preceding norm, and with biases if the model has them."""
    at = at or decoder(dims, dims.dense)
    rules = [
        at.rule("mlp.linear_fc1.layer_norm_weight", {"post_attention_layernorm.weight": (dims.hidden,)}),
        *gated_mlp(at, "mlp.", "mlp.", dims.hidden, dims.ffn),
    ]
    if dims.mlp_bias:
        gate, up = "mlp.gate_proj.bias", "mlp.up_proj.bias"
        rules.append(at.rule("mlp.linear_fc1.bias", {gate: (dims.ffn,), up: (dims.ffn,)}, GateUp()))
        # Every rank holds the complete bias, because it is added once.
        rules.append(at.rule("mlp.linear_fc2.bias", {"mlp.down_proj.bias": (dims.hidden,)}))
    return tuple(rules)


def dense_model(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of a model with only attention and a gated MLP in each layer."""
    return (*embeddings(dims), *attention(dims), *dense_mlp(dims))


def moe_mlp(
    dims: ModelDims,
    at: NamePrefix | None = None,
    *,
    shared: str = "",
    block: str = "mlp.",
    router: str = "gate",
    bias: str = "gate.e_score_correction_bias",
    names: tuple[str, str, str] = GATE_UP_DOWN,
) -> tuple[ParamMapping, ...]:
    """The MLP of the mixture-of-experts layers: norm, router (with its fp32 selection bias), routed and shared experts.

    HF names: `shared` experts, the complete `block`, `router`, its selection `bias`, and an expert's gate, up and down
    projection in `names`.
    """
    at = at or decoder(dims, dims.moe)
    rules = [
        at.rule("pre_mlp_layernorm.weight", {"post_attention_layernorm.weight": (dims.hidden,)}),
        at.rule("mlp.router.weight", {f"{block}{router}.weight": (dims.experts, dims.hidden)}, kind="Router"),
        *gated_mlp(
            at, "mlp.experts.experts.{expert}.", block + "experts.{expert}.", dims.hidden, dims.expert_ffn, names
        ),
    ]
    if dims.router_bias:
        rules.append(at.rule("mlp.router.expert_bias", {block + bias: (dims.experts,)}, fp32=True))
    if dims.shared_ffn:
        rules += gated_mlp(at, "mlp.shared_experts.", f"{block}{shared}.", dims.hidden, dims.shared_ffn)
    if dims.shared_gate:
        rules.append(at.rule("mlp.shared_experts.gate_weight", {f"{block}{shared}_gate.weight": (1, dims.hidden)}))
    return tuple(rules)


def joining_rules(
    dims: ModelDims, at: NamePrefix, names: tuple[str, str, str, str], op: Op | None = None
) -> list[ParamMapping]:
    """The input projection of a multi-token prediction layer with its norms, and the norm before the output layer.

    `names`: HF names of the norms of embedding and hidden state, of their projection (of [embedding, hidden state],
    unless `op` changes that), and of the last norm.
    """
    embedding, state, joint, last = names
    size = (dims.hidden,)
    return [
        at.rule("enorm.weight", {f"{embedding}.weight": size}),
        at.rule("hnorm.weight", {f"{state}.weight": size}),
        at.rule("eh_proj.weight", {f"{joint}.weight": (dims.hidden, 2 * dims.hidden)}, op or Copy(0)),
        at.rule("final_layernorm.weight", {f"{last}.weight": size}),
    ]


def multi_token_prediction(
    dims: ModelDims, depth: int, *, norm: str = "shared_head.norm"
) -> tuple[NamePrefix, tuple[ParamMapping, ...]]:
    """Multi-token prediction layer `depth` of DeepSeek and GLM, stored as decoder layer `layers + depth`.

    Returns the prefix of its transformer layer, and the rules around that: norms of embedding and hidden state, their
    projection eh_proj (input [embedding, hidden state]), and the norm before the output layer, called `norm`.
    """
    hf = f"{dims.root}layers.{dims.layers + depth}."
    around = joining_rules(dims, NamePrefix(f"mtp.layers.{depth}.", hf, None), ("enorm", "hnorm", "eh_proj", norm))
    return NamePrefix(f"mtp.layers.{depth}.transformer_layer.", hf, None), tuple(around)


def moe_model(
    dims: ModelDims,
    attention: Callable[..., tuple[ParamMapping, ...]],
    experts: Callable[..., tuple[ParamMapping, ...]],
    *,
    embedding: str = "embed_tokens",
    mtp_norm: str = "shared_head.norm",
) -> tuple[ParamMapping, ...]:
    """All rules of a mixture of experts with the multi-token prediction layers of DeepSeek and GLM.

    `attention` and `experts` return the rules of a layer's halves, from the sizes and an optional prefix. `embedding`:
    the embedding's HF module; `mtp_norm`: the norm before a multi-token prediction layer's output. In some releases
    these layers repeat embedding and output layer.
    """
    at = [f"{dims.root}layers.{dims.layers + depth}." for depth in range(dims.mtp_layers)]
    embeds, heads = (tuple(f"{place}{one}.weight" for place in at) for one in ("embed_tokens", "shared_head.head"))
    first = embeddings(dims, name=embedding, embed_copies=embeds, head_copies=heads)
    rules = [*first, *attention(dims), *dense_mlp(dims), *experts(dims)]
    for depth in range(dims.mtp_layers):
        layer, around = multi_token_prediction(dims, depth, norm=mtp_norm)
        rules += [*around, *attention(dims, layer), *experts(dims, layer)]
    return tuple(rules)


# The mixture of experts of DeepSeek and GLM.
shared_experts_mlp = partial(moe_mlp, shared="shared_experts")


def appended_drafts(text: Mapping[str, Any], root: str) -> tuple[Draft, ...]:
    """The multi-token prediction layers of DeepSeek and GLM, numbered after the decoder layers."""
    first, count = layer_count(text, "num_hidden_layers"), layer_count(text, "num_nextn_predict_layers")
    return tuple(_appended_draft(layer, root) for layer in range(first, first + count))


def _appended_draft(layer: int, root: str) -> Draft:
    # SGLang loads them as the model `model.decoder`.
    escaped, own = re.escape(root), f"{root}layers.{layer}."
    names = rf"model\.(layers\.{layer}|decoder)" if root == "model." else rf"({escaped}layers\.{layer}|model\.decoder)"
    return Draft(own, "model.decoder.", rf"re:{names}\..*", own, f"{own}eh_proj")


def layer_count(text: Mapping[str, Any], key: str, default: int = 0) -> int:
    """A number of layers in an unchecked config, or `default` if the key is absent."""
    value = text.get(key, default)
    return value if isinstance(value, int) else 0
