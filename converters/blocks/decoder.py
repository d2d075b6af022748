"""Rules of ordinary decoder layers. Megatron names are those that the Transformer Engine spec asks for."""

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

# An expert's gate, up and down projection as Mixtral names them.
W1_W3_W2 = ("w1", "w3", "w2")
# Some releases store these in each layer (Moonlight, Kimi K2, saves by transformers before 4.32); every reader computes
# them itself.
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

    `name` is the HF module of the embedding, `norm` Megatron's and HF's of the norm. The copies name further tensors
    that a release may repeat embedding and output layer under.
    """
    table = (dims.vocab, dims.hidden)
    # Some releases of tied models ship the output layer all the same.
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
    """Pre-norm grouped-query attention.

    With or without biases, q/k norms of one head's width, and an output gate from q_proj. The names are HF's: of the
    norm before it, of the block, of queries, keys and values where one matrix has all three, and of what is behind.
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
    """Norms of queries and keys over all heads at once, called `norm` and cut along `axis` over ranks."""
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
    """A SwiGLU block: gate and up projection into linear_fc1, down projection into linear_fc2.

    `names` are those of the three.
    """
    gate, up, down = (f"{hf}{name}.weight" for name in names)
    return (
        at.rule(megatron + "linear_fc1.weight", {gate: (ffn, hidden), up: (ffn, hidden)}, GateUp()),
        at.rule(megatron + "linear_fc2.weight", {down: (hidden, ffn)}, Copy(1)),
    )


def mlp_in_one(dims: ModelDims, at: NamePrefix) -> tuple[ParamMapping, ...]:
    """A SwiGLU block with the norm before it, whose gate and up projection are one matrix."""
    return (
        at.rule("mlp.linear_fc1.layer_norm_weight", {"post_attention_layernorm.weight": (dims.hidden,)}),
        at.rule("mlp.linear_fc1.weight", {"mlp.gate_up_proj.weight": (2 * dims.ffn, dims.hidden)}, GateUpInOne()),
        at.rule("mlp.linear_fc2.weight", {"mlp.down_proj.weight": (dims.hidden, dims.ffn)}, Copy(1)),
    )


def dense_mlp(dims: ModelDims, at: NamePrefix | None = None) -> tuple[ParamMapping, ...]:
    """The MLP of the dense layers with the norm before it, and with biases where the model has them."""
    at = at or decoder(dims, dims.dense)
    rules = [
        at.rule("mlp.linear_fc1.layer_norm_weight", {"post_attention_layernorm.weight": (dims.hidden,)}),
        *gated_mlp(at, "mlp.", "mlp.", dims.hidden, dims.ffn),
    ]
    if dims.mlp_bias:
        gate, up = "mlp.gate_proj.bias", "mlp.up_proj.bias"
        rules.append(at.rule("mlp.linear_fc1.bias", {gate: (dims.ffn,), up: (dims.ffn,)}, GateUp()))
        # Added once, so every rank holds all of it.
        rules.append(at.rule("mlp.linear_fc2.bias", {"mlp.down_proj.bias": (dims.hidden,)}))
    return tuple(rules)


def dense_model(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All rules of a model whose layers are attention and a gated MLP, and nothing else."""
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

    `shared` is the HF module name of the shared experts, `block` that of the whole, `router` that of the router, `bias`
    that of the selection bias, and `names` those of an expert's gate, up and down projection.
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
    """What joins embedding and hidden state for a multi-token prediction layer, and the norm before the output layer.

    `names`: HF's of the norms of both, of their projection (of [embedding, hidden state], unless `op` says otherwise),
    and of the last norm.
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
    """Multi-token prediction layer `depth` as DeepSeek and GLM ship it, as decoder layer `layers + depth`.

    Returns the place of its transformer layer, and the rules around that: norms of embedding and hidden state, their
    projection eh_proj (which takes [embedding, hidden state]), and the norm before the output layer, called `norm`.
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

    `attention` and `experts` give the rules of a layer's halves from the sizes, and of a place that follows them.
    `embedding` is the HF module of the embedding, `mtp_norm` that before a further layer's output. Those layers repeat
    embedding and output layer in some releases.
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
    """The multi-token prediction layers as DeepSeek and GLM ship them, numbered after the decoder layers."""
    first, count = layer_count(text, "num_hidden_layers"), layer_count(text, "num_nextn_predict_layers")
    return tuple(_appended_draft(layer, root) for layer in range(first, first + count))


def _appended_draft(layer: int, root: str) -> Draft:
    # SGLang reads them as the model `model.decoder`.
    escaped, own = re.escape(root), f"{root}layers.{layer}."
    names = rf"model\.(layers\.{layer}|decoder)" if root == "model." else rf"({escaped}layers\.{layer}|model\.decoder)"
    return Draft(own, "model.decoder.", rf"re:{names}\..*", own, f"{own}eh_proj")


def layer_count(text: Mapping[str, Any], key: str, default: int = 0) -> int:
    """A number of layers in a config that nobody has checked yet; `default` where the key is absent."""
    value = text.get(key, default)
    return value if isinstance(value, int) else 0
