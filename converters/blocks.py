"""Rules that families share. Megatron names are those that the Transformer Engine spec asks for."""

from __future__ import annotations

from converters.dims import ModelDims
from converters.ops import Copy, GateUp, Qkv
from converters.rules import ParamMapping

M = "decoder.layers.{layer}."
H = "model.layers.{layer}."


def embeddings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """Token embedding, final norm, and the output layer unless it is tied to the embedding."""
    table = (dims.vocab, dims.hidden)
    head = ParamMapping("output_layer.weight", {"lm_head.weight": table}, Copy(0), vocab=True)
    return (
        ParamMapping("embedding.word_embeddings.weight", {"model.embed_tokens.weight": table}, Copy(0), vocab=True),
        ParamMapping("decoder.final_layernorm.weight", {"model.norm.weight": (dims.hidden,)}),
        *(() if dims.tied else (head,)),
    )


def attention(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """Pre-norm grouped-query attention, with or without qkv biases and q/k norms."""
    layers = range(dims.layers)
    rows = {"q_proj": dims.heads * dims.head_dim, "k_proj": dims.groups * dims.head_dim, "v_proj": dims.groups * dims.head_dim}
    weights = {H + f"self_attn.{part}.weight": (count, dims.hidden) for part, count in rows.items()}
    biases = {H + f"self_attn.{part}.bias": (count,) for part, count in rows.items()}
    qkv = Qkv(dims.heads, dims.groups, dims.head_dim)
    bias = ParamMapping(M + "self_attention.linear_qkv.bias", biases, qkv, layers)
    norms = [ParamMapping(M + f"self_attention.{x}_layernorm.weight", {H + f"self_attn.{x}_norm.weight": (dims.head_dim,)}, layers=layers) for x in ("q", "k")]
    out = {H + "self_attn.o_proj.weight": (dims.hidden, dims.heads * dims.head_dim)}
    return (
        ParamMapping(M + "self_attention.linear_qkv.layer_norm_weight", {H + "input_layernorm.weight": (dims.hidden,)}, layers=layers),
        ParamMapping(M + "self_attention.linear_qkv.weight", weights, qkv, layers),
        *((bias,) if dims.qkv_bias else ()),
        ParamMapping(M + "self_attention.linear_proj.weight", out, Copy(1), layers),
        *(norms if dims.qk_norm else ()),
    )


def gated_mlp(megatron: str, hf: str, hidden: int, ffn: int, layers: range) -> tuple[ParamMapping, ...]:
    """A SwiGLU block: gate_proj and up_proj into linear_fc1, down_proj into linear_fc2."""
    gate_up = {H + hf + "gate_proj.weight": (ffn, hidden), H + hf + "up_proj.weight": (ffn, hidden)}
    return (
        ParamMapping(M + megatron + "linear_fc1.weight", gate_up, GateUp(), layers),
        ParamMapping(M + megatron + "linear_fc2.weight", {H + hf + "down_proj.weight": (hidden, ffn)}, Copy(1), layers),
    )


def dense_mlp(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """The MLP of the dense layers with the norm before it."""
    norm = {H + "post_attention_layernorm.weight": (dims.hidden,)}
    return (
        ParamMapping(M + "mlp.linear_fc1.layer_norm_weight", norm, layers=dims.dense),
        *gated_mlp("mlp.", "mlp.", dims.hidden, dims.ffn, dims.dense),
    )


def moe_mlp(dims: ModelDims, shared: str = "") -> tuple[ParamMapping, ...]:
    """The MLP of the mixture-of-experts layers: norm, router (with its fp32 selection bias), routed and shared experts.

    `shared` is the HF module name of the shared experts; they are there when the model has any.
    """
    norm = {H + "post_attention_layernorm.weight": (dims.hidden,)}
    bias = {H + "mlp.gate.e_score_correction_bias": (dims.experts,)}
    return (
        ParamMapping(M + "pre_mlp_layernorm.weight", norm, layers=dims.moe),
        ParamMapping(M + "mlp.router.weight", {H + "mlp.gate.weight": (dims.experts, dims.hidden)}, layers=dims.moe),
        *((ParamMapping(M + "mlp.router.expert_bias", bias, layers=dims.moe, fp32=True),) if dims.router_bias else ()),
        *gated_mlp("mlp.experts.experts.{expert}.", "mlp.experts.{expert}.", dims.hidden, dims.expert_ffn, dims.moe),
        *(gated_mlp("mlp.shared_experts.", f"mlp.{shared}.", dims.hidden, dims.shared_ffn, dims.moe) if dims.shared_ffn else ()),
    )
