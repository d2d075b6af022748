"""Granite 4: each layer has a Mamba-2 mixer or attention, a shared MLP and, in the larger models, experts.

Embeddings, residuals, attention and logits are scaled by four numbers of config.json. Megatron's HybridModel holds all
of the weights, but scales attention alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError
from converters.blocks.decoder import attention, embeddings
from converters.config.dims import Mamba, ModelDims, base_dims
from converters.config.values import integer, kinds_of_layers, number, places, require, rope_of, unsupported, wrong
from converters.families.nemotron_h import mixer, refuse_time_step_limit
from converters.family import EngineClass, ModelFamily, Release, Unwitnessed
from converters.rules import ParamMapping, decoder, unnamed

_ONLY = {
    "attention_bias": False,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "normalization_function": "rmsnorm",
    "position_embedding_type": ("rope", "nope"),
}
_STACKED = ("block_sparse_moe.input_linear", "block_sparse_moe.output_linear")
_IN_ENGINES = (("mamba", "mixer"),)
_SCALES = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
# Transformers and SGLang take other values for each of these where config.json does not state it.
_STATED = (*_SCALES, "layer_types", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "num_local_experts")


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a granitemoehybrid config. Source: transformers `GraniteMoeHybridConfig`, `GraniteMoeHybridMambaLayer`.

    Raises CkptkitError for what readers compute differently, and for what no released model has.
    """
    require(config, "granitemoehybrid", _ONLY)
    refuse_time_step_limit(config)
    for key in _STATED:
        if config.get(key) is None:
            raise CkptkitError(
                f"config.json has no {key!r}",
                "transformers and SGLang have other defaults; compare it with the release",
            )
    scales = {key: number(config, key) for key in _SCALES}
    if unscaled := [key for key, value in scales.items() if value <= 0]:
        raise wrong(unscaled[0], scales[unscaled[0]], "positive")
    mixers = places(kinds_of_layers(config, "layer_types", ("mamba", "attention")) or (), "mamba")
    if rope_of(config)["rope_type"] != "default":
        raise unsupported("granitemoehybrid with rope_scaling or rope_parameters that scale", "no release has them")
    dims = base_dims(
        config,
        rotary=config.get("position_embedding_type") == "rope",
        mamba=_mamba(config) if mixers else None,
        mixer_layers=mixers,
        experts=integer(config, "num_local_experts"),
        top_k=integer(config, "num_experts_per_tok", 0),
        expert_ffn=integer(config, "intermediate_size"),
        shared_ffn=integer(config, "shared_intermediate_size"),
        embedding_scale=scales["embedding_multiplier"],
        attention_scale=scales["attention_multiplier"],
    )
    if dims.shared_ffn == 0:
        raise unsupported("shared_intermediate_size 0", "compare it with the release")
    head_dim = {"head_dim": dims.hidden // dims.heads}
    require(config, "granitemoehybrid", head_dim, "SGLang takes the hidden size divided by the heads")
    return dims


def _mamba(config: Mapping[str, Any]) -> Mamba:
    heads, inner = integer(config, "mamba_n_heads"), integer(config, "mamba_expand", 2) * integer(config, "hidden_size")
    size = config.get("mamba_d_head")
    net = Mamba(
        heads=heads,
        head_dim=inner // max(heads, 1) if size == "auto" else integer(config, "mamba_d_head"),
        groups=integer(config, "mamba_n_groups", 1),
        state=integer(config, "mamba_d_state"),
        kernel=integer(config, "mamba_d_conv", 4),
    )
    if net.inner != inner:
        raise CkptkitError(
            f"config.json: {heads} Mamba heads of {net.head_dim} are not the {inner} features of mamba_expand",
            "compare both with the release",
        )
    return net


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All tensors of the model. The experts of a layer are two tensors, each expert's gate above its up."""
    hidden, ffn, shared = dims.hidden, dims.expert_ffn, dims.shared_ffn
    every, routed, at = (decoder(dims, layers) for layers in (dims.all_layers, dims.moe, dims.mixers))
    sizes = zip(_STACKED, ((2 * ffn, hidden), (hidden, ffn)), strict=True)
    experts = {f"{name}.weight": (dims.experts, *shape) for name, shape in sizes}
    router = {"block_sparse_moe.router.layer.weight": (dims.experts, hidden)}
    block = (*routed.tensors(router, kind="Router"), *routed.tensors(experts, kind="Experts"))
    mlp = {"input_linear": (2 * shared, hidden), "output_linear": (hidden, shared)}
    return unnamed(
        (
            *embeddings(dims),
            *(block if dims.experts else ()),
            *(mixer(dims, at, hf="mamba", norm="input_layernorm.weight") if dims.mixers else ()),
            *attention(dims),
            *every.tensors({"post_attention_layernorm.weight": (hidden,)}),
            *every.tensors({f"shared_mlp.{name}.weight": shape for name, shape in mlp.items()}),
        )
    )


def _sglang_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's config class takes 10000 where `rope_theta` is absent, and turns no other dimension."""
    dims = read_dims(config)
    return {"rope_theta": dims.rope_theta} if dims.rotary and dims.rope_theta != 10000 else {}


FAMILIES = (
    ModelFamily(
        ("granitemoehybrid",),
        ("GraniteMoeHybridForCausalLM",),
        read_dims,
        mappings,
        release=Release(
            classes={"Experts": "GraniteMoeHybridParallelExperts"},
            routers=(".block_sparse_moe.router.layer",),
            stacked=_STACKED,
        ),
        # No release that was read has `layer_id`.
        engines={
            "sglang": EngineClass(("qkv_proj",), inside=_IN_ENGINES, keys=_sglang_keys),
            "vllm": EngineClass(inside=_IN_ENGINES),
        },
        unwitnessed=Unwitnessed(
            "HybridModel lacks the multipliers of embeddings, residuals and logits, and would compute wrong numbers",
            None,
        ),
    ),
)
