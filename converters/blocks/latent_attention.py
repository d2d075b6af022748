"""Multi-head latent attention of DeepSeek V2 and V3, Kimi and GLM-4.7-Flash.

Queries, and keys with values, are compressed, then expanded for each head. All tensors are copied unchanged: like these
releases, Megatron rotates dimensions in pairs (its `multi_latent_attention.py`) and has all key and value heads in one
matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.converters.config.dims import Mla, ModelDims
from ckptkit.converters.config.values import integer, number, require, rope_of, unsupported
from ckptkit.converters.ops.basic import Copy
from ckptkit.converters.ops.shapes import Shape
from ckptkit.converters.rules import NamePrefix, ParamMapping, decoder
from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened

# Settings of yarn without a flag in Megatron-LM, with the defaults of its MLATransformerConfig.
WITHOUT_FLAG: Mapping[str, float] = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}


def read_mla(config: Mapping[str, Any], *, rotary: bool = True) -> Mla:
    """Ranks and head sizes under DeepSeek's keys. `rotary`: some dimensions have rotary embedding.

    Raises CkptkitError for features that Megatron's MLA does not have.
    """
    if "q_lora_rank" not in config:
        hint = "restore q_lora_rank from the release (null: queries are not compressed)"
        raise CkptkitError("config.json has no 'q_lora_rank'", hint)
    why = "Megatron's latent attention has no biases; no released model has them"
    require(config, "latent attention", {"attention_bias": False}, why)
    require(config, "latent attention", {"rope_interleave": True}, "Megatron's rotates only interleaved pairs")
    heads = integer(config, "num_attention_heads")
    if (key_values := integer(config, "num_key_value_heads", heads)) != heads:
        message = f"config.json: num_key_value_heads is {key_values}, but num_attention_heads is {heads}"
        raise CkptkitError(message, "make them equal: latent attention has one key-value head per query head")
    if number(rope_of(config), "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0)) != 1:
        hint = "remove partial_rotary_factor: qk_rope_head_dim is the number of rotary dimensions"
        raise unsupported("partial_rotary_factor with latent attention", hint)
    rope = integer(config, "qk_rope_head_dim")
    if rotary != (rope != 0):
        raise unsupported(f"qk_rope_head_dim {rope}", "compare qk_rope_head_dim with the release")
    return Mla(
        q_rank=None if config["q_lora_rank"] is None else integer(config, "q_lora_rank"),
        kv_rank=integer(config, "kv_lora_rank"),
        nope=integer(config, "qk_nope_head_dim"),
        rope=rope,
        value=integer(config, "v_head_dim"),
    )


def mla_attention(dims: ModelDims, at: NamePrefix | None = None) -> tuple[ParamMapping, ...]:
    """Pre-norm latent attention; every rank holds the complete down projections, and a part of the up projections."""
    mla, at = dims.mla, at or decoder(dims, dims.softmax_layers)
    assert mla is not None, "a family without latent attention has no such rules"

    def rule(megatron: str, hf: str, shape: Shape, axis: int | None = None) -> ParamMapping:
        return at.rule(f"self_attention.linear_{megatron}", {f"self_attn.{hf}.weight": shape}, Copy(axis))

    query = (dims.heads * (mla.nope + mla.rope), mla.q_rank or dims.hidden)
    if mla.q_rank is None:
        queries = [rule("q_proj.weight", "q_proj", query, 0)]
    else:
        queries = [
            rule("q_down_proj.weight", "q_a_proj", (mla.q_rank, dims.hidden)),
            rule("q_up_proj.layer_norm_weight", "q_a_layernorm", (mla.q_rank,)),
            rule("q_up_proj.weight", "q_b_proj", query, 0),
        ]
    return (
        at.rule("input_layernorm.weight", {"input_layernorm.weight": (dims.hidden,)}),
        *queries,
        rule("kv_down_proj.weight", "kv_a_proj_with_mqa", (mla.kv_rank + mla.rope, dims.hidden)),
        rule("kv_up_proj.layer_norm_weight", "kv_a_layernorm", (mla.kv_rank,)),
        rule("kv_up_proj.weight", "kv_b_proj", (dims.heads * (mla.nope + mla.value), mla.kv_rank), 0),
        rule("proj.weight", "o_proj", (dims.hidden, dims.heads * mla.value), 1),
    )


def refuse_scaling(rope: Mapping[str, Any]) -> None:
    """Raises CkptkitError for a rope scaling other than yarn, which Megatron's latent attention does not support.

    transformers and Megatron multiply cosines and sines by the same number only if both of mscale and mscale_all_dim
    are present, or neither. Sources: transformers `_compute_yarn_parameters` and `DeepseekV3Attention`, megatron-core
    `yarn_rotary_pos_embedding.py`.
    """
    kind = rope["rope_type"]
    if kind != "yarn":
        message = f"config.json: Megatron has no arguments for rope scaling {shortened(kind)} with latent attention"
        raise CkptkitError(message, "start from a model with yarn: Megatron has no other scaling", code="unsupported")
    for key, only in (("attention_factor", None), ("truncate", True)):
        if rope.get(key, only) not in (only, None):
            raise CkptkitError(
                f"config.json: Megatron has no arguments for yarn with {key} {shortened(rope[key])}",
                "remove it only if you mean to train a different model",
                code="unsupported",
            )
    mscale, all_dim = number(rope, "mscale", 0.0), number(rope, "mscale_all_dim", 0.0)
    if bool(mscale) != bool(all_dim):
        hint = "set both or neither: transformers ignores a single one, Megatron and SGLang apply it"
        raise unsupported(f"yarn with mscale {mscale:g} and mscale_all_dim {all_dim:g}", hint)
