"""Multi-head latent attention of DeepSeek V2 and V3, Kimi and GLM-4.7-Flash.

Queries and keys with values are compressed, then expanded a head.

Everything is copied as it is: Megatron takes the rotary dimensions in pairs, as these releases have them (its
`multi_latent_attention.py`), and keeps all key and value heads in one matrix as they do.
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

# What yarn needs and no flag of Megatron-LM says, with the defaults of its MLATransformerConfig.
WITHOUT_FLAG: Mapping[str, float] = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}


def read_mla(config: Mapping[str, Any], *, rotary: bool = True) -> Mla:
    """Ranks and head sizes under the names that DeepSeek gave them. `rotary`: some dimensions have rotary embedding.

    Raises CkptkitError for what Megatron's MLA does not do.
    """
    if "q_lora_rank" not in config:
        raise CkptkitError(
            "config.json has no 'q_lora_rank'",
            "it must say null where queries are not compressed; compare with the release",
        )
    require(
        config, "latent attention", {"attention_bias": False}, "Megatron's has no biases; no released model has them"
    )
    require(config, "latent attention", {"rope_interleave": True}, "Megatron's turns the rotary dimensions in pairs")
    heads = integer(config, "num_attention_heads")
    if integer(config, "num_key_value_heads", heads) != heads:
        raise CkptkitError(
            f"config.json: num_key_value_heads is not the {heads} of num_attention_heads",
            "latent attention has one key and value head a query head",
        )
    if number(rope_of(config), "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0)) != 1:
        raise unsupported(
            "partial_rotary_factor with latent attention", "qk_rope_head_dim says how many dimensions turn"
        )
    rope = integer(config, "qk_rope_head_dim")
    if rotary != (rope != 0):
        raise unsupported(f"qk_rope_head_dim {rope}", "compare it with the release")
    return Mla(
        q_rank=None if config["q_lora_rank"] is None else integer(config, "q_lora_rank"),
        kv_rank=integer(config, "kv_lora_rank"),
        nope=integer(config, "qk_nope_head_dim"),
        rope=rope,
        value=integer(config, "v_head_dim"),
    )


def mla_attention(dims: ModelDims, at: NamePrefix | None = None) -> tuple[ParamMapping, ...]:
    """Pre-norm latent attention.

    `dims.mla` must be set. Down projections are whole on every rank, up projections cut by heads.
    """
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
    """Raises CkptkitError for a rope scaling that Megatron's latent attention does not know, which is all but yarn.

    Sources: transformers `_compute_yarn_parameters` and `DeepseekV3Attention`, megatron-core
    `yarn_rotary_pos_embedding.py`.

    The two multiply cosines and sines by the same number only where both of mscale and mscale_all_dim are there, or
    neither.
    """
    kind = rope["rope_type"]
    if kind != "yarn":
        raise CkptkitError(
            f"config.json: rope scaling {shortened(kind)} with latent attention has no Megatron arguments",
            "Megatron only knows yarn there",
            code="unsupported",
        )
    for key, only in (("attention_factor", None), ("truncate", True)):
        if rope.get(key, only) not in (only, None):
            raise CkptkitError(
                f"config.json: yarn with {key} {shortened(rope[key])} has no Megatron arguments",
                "training would run another model than this one",
                code="unsupported",
            )
    mscale, all_dim = number(rope, "mscale", 0.0), number(rope, "mscale_all_dim", 0.0)
    if bool(mscale) != bool(all_dim):
        raise unsupported(
            f"yarn with mscale {mscale:g} and mscale_all_dim {all_dim:g}",
            "transformers ignores one without the other, but Megatron and SGLang do not",
        )
