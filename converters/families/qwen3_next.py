"""Qwen3-Next: linear attention (gated delta net) in three of four layers, gated attention, experts, one MTP layer.

Names and order on Megatron's side: megatron-core `ssm/gated_delta_net`; on the HF side: transformers
`Qwen3NextGatedDeltaNet` and `Qwen3_5GatedDeltaNet`, which differ in how the input projection is cut into tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ckptkit.converters.blocks.decoder import attention, dense_mlp, embeddings, joining_rules, layer_count, moe_mlp
from ckptkit.converters.config.dims import LinearAttention, ModelDims, base_dims, read_experts
from ckptkit.converters.config.values import agreed, flag, integer, kinds_of_layers, places, require, unsupported, wrong
from ckptkit.converters.family import Draft, ModelFamily, Release
from ckptkit.converters.ops.basic import ByKeyHead, Copy, MinusOne, Op, StackedRows
from ckptkit.converters.rules import NamePrefix, ParamMapping, decoder
from ckptkit.core.errors import CkptkitError

_KINDS = ("linear_attention", "full_attention")


def read_linear_attention(config: Mapping[str, Any]) -> LinearAttention:
    """Sizes and layers of the gated delta net.

    Raises CkptkitError when `layer_types` and `full_attention_interval` disagree.
    """
    count, interval = integer(config, "num_hidden_layers"), integer(config, "full_attention_interval", 4)
    if interval < 1:
        raise wrong("full_attention_interval", interval, "a positive whole number")
    by_interval = [_KINDS[(layer + 1) % interval == 0] for layer in range(count)]
    kinds = kinds_of_layers({**config, "layer_types": config.get("layer_types") or by_interval}, "layer_types", _KINDS)
    if "full_attention_interval" in config and kinds != by_interval:
        message = f"config.json: layer_types ({count} layers) contradicts full_attention_interval {interval}"
        raise CkptkitError(message, "make both agree: transformers reads the first and SGLang the second")
    return LinearAttention(
        key_heads=integer(config, "linear_num_key_heads"),
        value_heads=integer(config, "linear_num_value_heads"),
        key_dim=integer(config, "linear_key_head_dim"),
        value_dim=integer(config, "linear_value_head_dim"),
        kernel=integer(config, "linear_conv_kernel_dim", 4),
        layers=places(kinds or (), _KINDS[0]),
    )


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raises CkptkitError for switches of these configs that no released model sets otherwise."""
    usual = {"attention_bias": False, "attn_output_gate": True, "mtp_use_dedicated_embeddings": False}
    require(config, "a model with linear attention", {**usual, "mlp_only_layers": [], "decoder_sparse_step": 1})


def read_mtp_layers(config: Mapping[str, Any], linear: LinearAttention, default: int) -> int:
    """The number of multi-token prediction layers, 0 or 1, under Qwen3.5's or vLLM's key, or `default`.

    Raises CkptkitError for more than one, since HF's `mtp` has one projection but Megatron one per layer, and if the
    last decoder layer has another kind of attention than `mtp`, since Megatron builds both with the same.
    """
    count = int(agreed(config, ("mtp_num_hidden_layers", "num_nextn_predict_layers"), default))
    if count not in (0, 1):
        raise unsupported(f"mtp_num_hidden_layers {count}", "no released model has more than one")
    last = integer(config, "num_hidden_layers") - 1
    if count and last in linear.layers:
        raise unsupported(
            f"multi-token prediction after linear attention in the last decoder layer ({last})",
            "set mtp_num_hidden_layers to 0 and remove the mtp tensors: Megatron would build `mtp` as the last layer, "
            "not with full attention",
        )
    return count


def gated_delta_net(dims: ModelDims, *, by_key_head: bool) -> tuple[ParamMapping, ...]:
    """Pre-norm linear attention in megatron-core's module, which joins all input projections in one.

    `by_key_head`: the HF input projection is two tensors ordered by key head (Qwen3-Next), not four ordered by kind
    (Qwen3.5).
    """
    net = _net(dims)
    at = decoder(dims, net.layers)
    shapes = _shapes(dims, by_key_head)
    inputs = {name: shape for name, shape in shapes.items() if ".in_proj_" in name}
    conv = "linear_attn.conv1d.weight"
    order: Op = (
        ByKeyHead(net) if by_key_head else StackedRows(tuple(shape[0] for shape in inputs.values()), net.in_proj)
    )
    return (
        at.rule("self_attention.in_proj.layer_norm_weight", {"input_layernorm.weight": (dims.hidden,)}),
        at.rule("self_attention.in_proj.weight", inputs, order),
        at.rule(
            "self_attention.conv1d.weight", {conv: shapes[conv]}, StackedRows((sum(net.conv),), net.conv), kind="Conv1d"
        ),
        *(
            at.rule(f"self_attention.{name}", {f"linear_attn.{name}": (net.value_heads,)}, Copy(0), fp32=True)
            for name in ("A_log", "dt_bias")
        ),
        # The only norm of these models that HF does not store minus one.
        at.rule(
            "self_attention.out_norm.weight", {"linear_attn.norm.weight": (net.value_dim,)}, MinusOne(), upcast=True
        ),
        at.rule(
            "self_attention.out_proj.weight",
            {"linear_attn.out_proj.weight": shapes["linear_attn.out_proj.weight"]},
            Copy(1),
        ),
    )


def hf_linear_attention(dims: ModelDims, *, by_key_head: bool) -> tuple[ParamMapping, ...]:
    """Pre-norm linear attention in slime's module: the HF one, whole on every rank (`HuggingfaceAttention`)."""
    at = decoder(dims, _net(dims).layers)
    state = ("linear_attn.A_log", "linear_attn.dt_bias")
    shapes = {"input_layernorm.weight": (dims.hidden,), **_shapes(dims, by_key_head)}
    return tuple(at.rule("self_attention." + name, {name: shape}, fp32=name in state) for name, shape in shapes.items())


def _net(dims: ModelDims) -> LinearAttention:
    assert dims.linear is not None, "a family without linear attention has no such rules"
    return dims.linear


def _shapes(dims: ModelDims, by_key_head: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor of the HF module, in the order in which Megatron joins the input projections."""
    net = _net(dims)
    qkv, z, value_heads = sum(net.conv), net.value_heads * net.value_dim, net.value_heads
    inputs = (
        {"qkvz": qkv + z, "ba": 2 * value_heads}
        if by_key_head
        else {"qkv": qkv, "z": z, "b": value_heads, "a": value_heads}
    )
    return {
        **{f"linear_attn.in_proj_{name}.weight": (rows, dims.hidden) for name, rows in inputs.items()},
        "linear_attn.conv1d.weight": (qkv, 1, net.kernel),
        "linear_attn.A_log": (value_heads,),
        "linear_attn.dt_bias": (value_heads,),
        "linear_attn.norm.weight": (net.value_dim,),
        "linear_attn.out_proj.weight": (dims.hidden, z),
    }


def linear_model(dims: ModelDims, *, by_key_head: bool, slime: bool = False) -> tuple[ParamMapping, ...]:
    """All rules of a model with gated delta nets, which are the HF module in `slime`. `by_key_head`: see those.

    `fc` of the multi-token prediction layer takes [embedding, hidden state], like Megatron's eh_proj and SGLang's
    `Qwen3NextForCausalLMMTP`.
    """
    linear = (hf_linear_attention if slime else gated_delta_net)(dims, by_key_head=by_key_head)
    rules = [*linear, *embeddings(dims), *attention(dims), *_mlp(dims)]
    if dims.mtp_layers:
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        layer = NamePrefix("mtp.layers.0.transformer_layer.", "mtp.layers.0.", None)
        rules += joining_rules(dims, NamePrefix("mtp.layers.0.", "mtp.", None), names)
        rules += [*attention(dims, layer), *_mlp(dims, layer)]
    return tuple(rules)


def _mlp(dims: ModelDims, at: NamePrefix | None = None) -> tuple[ParamMapping, ...]:
    return moe_mlp(dims, at, shared="shared_expert") if dims.experts else dense_mlp(dims, at)


def qwen_drafts(text: Mapping[str, Any], root: str) -> tuple[Draft, ...]:
    """The multi-token prediction layer of Qwen3.5, if the config declares one."""
    return _qwen_draft("mtp.", layer_count(text, "mtp_num_hidden_layers"), unfuses=False)


def qwen_next_drafts(text: Mapping[str, Any], root: str) -> tuple[Draft, ...]:
    """The multi-token prediction layer of Qwen3-Next, which has no key; SGLang uses the first layer's names for it."""
    return _qwen_draft(None, layer_count(text, "mtp_num_hidden_layers", 1), unfuses=True)


def _qwen_draft(sglang: str | None, count: int, *, unfuses: bool) -> tuple[Draft, ...]:
    own = "model." if sglang is None else None
    draft = Draft("mtp.", sglang, r"re:mtp\..*", "mtp.layers.0.", "mtp.fc", unfuses, vllm_joint=True, sglang_own=own)
    return (draft,) if count else ()


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a qwen3_next config. Source: transformers `Qwen3NextConfig`.

    The releases have an MTP layer without a key for it; a config for weights without it requires
    `mtp_num_hidden_layers` 0.
    """
    refuse_unsupported(config)
    linear = read_linear_attention(config)
    return base_dims(
        {"head_dim": 256, "partial_rotary_factor": 0.25, **config},
        qk_norm=True,
        attention_gate=True,
        norm_offset=True,
        linear=linear,
        mtp_layers=read_mtp_layers(config, linear, 1),
        shared_ffn=integer(config, "shared_expert_intermediate_size"),
        shared_gate=True,
        router_normalize=flag(config, "norm_topk_prob", True),
        **read_experts(config),
    )


FAMILIES = (
    ModelFamily(
        ("qwen3_next",),
        ("Qwen3NextForCausalLM",),
        read_dims,
        partial(linear_model, by_key_head=True),
        {"slime": partial(linear_model, by_key_head=True, slime=True)},
        release=Release(drafts=qwen_next_drafts, classes={"Router": "Qwen3NextTopKRouter"}),
    ),
)
