"""GLM-5.3-Flash: three of four layers have Kimi delta attention (KDA), the others sparse latent attention.

Latent attention has no rotary embedding, and an indexer that pools keys. Residuals are several streams, which learned
weights mix before and after each block (hyper-connections). A multi-token prediction layer, without those, and a vision
tower come with it. Stacks name these models differently for Megatron, so the rules have HF's names on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from converters.blocks.decoder import dense_mlp, embeddings, moe_mlp
from converters.blocks.latent_attention import mla_attention, read_mla
from converters.blocks.sigmoid_moe import dense_layers, read_sigmoid_moe
from converters.config.dims import Indexer, Kda, ModelDims, base_dims
from converters.config.values import agreed, integer, kinds_of_layers, places, require, text_part, unsupported, wrong
from converters.families.kimi_k3 import kda
from converters.family import ModelFamily, Unwitnessed
from converters.ops.shapes import Shape
from converters.rules import NamePrefix, ParamMapping, decoder, unnamed

# What the release says. transformers 5.24 knows no switch for most of it and does the same.
_FIXED: Mapping[str, Any] = {
    "index_kpool_compress": True,
    "index_topk_freq": 1,
    "index_topk_pattern": None,
    "mhc": True,
    "mla_use_nope": True,
    "model_type": "glm5_next_text",
    "tie_word_embeddings": False,
}
_LINEAR = "linear_attention"
# Words for the other layers: the release's, that of its first config class, and that which transformers saves.
_SPARSE = ("deepseek_sparse_attention", "full_attention", "indexed_attention")
# Sizes of KDA in the release's `linear_attn_config`, and as transformers saves them.
_KDA = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of the language model of a glm5_next config. Source: transformers 5.24 `Glm5NextTextConfig`.

    Raises CkptkitError for what no released model has, and for what readers take differently.
    """
    text, root = text_part(config)
    inner = config["text_config"]
    require(inner, "glm5_next", _FIXED, strict=True)
    require(text, "glm5_next", {"tie_word_embeddings": False}, "the release has its own output layer")
    kinds = kinds_of_layers({**text, "layer_types": text.get("layer_types") or ()}, "layer_types", (_LINEAR, *_SPARSE))
    linear = places(kinds or (), _LINEAR)
    stated = (text.get("linear_attn_config") or {}).get("kda_layers")
    if stated is not None and stated != list(linear):
        raise CkptkitError(
            f"config.json: layer_types has KDA in layers {shortened(list(linear))}, but kda_layers is "
            f"{shortened(stated)}",
            "transformers reads the first, engines the second; make them agree",
        )
    if text.get("mlp_layer_types") is None:
        raise CkptkitError("config.json has no 'mlp_layer_types'", "readers take 1 or 3 dense layers without it")
    mla = read_mla(text, rotary=False)
    if mla.q_rank is None:
        raise unsupported("glm5_next with q_lora_rank null", "the indexer takes compressed queries")
    dims = base_dims(
        {key: value for key, value in text.items() if key != "head_dim"},
        root=root,
        rotary=False,
        mla=mla,
        kda=_kda(text),
        mixer_layers=linear,
        dense_layers=dense_layers(text),
        own=integer(text, "hc_mult"),
        mtp_layers=integer(text, "num_nextn_predict_layers", 0),
        **read_sigmoid_moe(text, absent={}),
    )
    why = "the release has an indexer of its own in every layer without KDA"
    require(text, "glm5_next", {"indexer_types": ["full"] * dims.layers}, why)
    indexer = Indexer(
        heads=integer(text, "index_n_heads"),
        head_dim=integer(text, "index_head_dim"),
        top_k=integer(text, "index_topk"),
        layers=dims.softmax_layers,
        pool=integer(text, "index_kpool"),
    )
    if indexer.pool < 1 or dims.own < 1:
        raise wrong("index_kpool or hc_mult", (indexer.pool, dims.own), "positive")
    return replace(dims, indexer=indexer)


def _kda(text: Mapping[str, Any]) -> Kda:
    """Sizes of KDA under either spelling."""
    given = text.get("linear_attn_config") or {}
    if not isinstance(given, Mapping):
        raise wrong("linear_attn_config", given, "an object")
    both = {**{f"linear_attn_config.{key}": value for key, value in given.items()}, **text}
    return Kda(*(agreed(both, (f"linear_attn_config.{key}", other)) for key, other in _KDA.items()))


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All tensors of the model, with those of its multi-token prediction layers."""
    linear = decoder(dims, dims.mixers)
    return unnamed(
        (
            *embeddings(dims),
            *_hyper_connections(dims),
            linear.rule("", {"input_layernorm.weight": (dims.hidden,)}),
            *kda(dims, full_gate=False),
            *_sparse_attention(dims, decoder(dims, dims.softmax_layers)),
            *dense_mlp(dims),
            *moe_mlp(dims, shared="shared_experts"),
            *(rule for depth in range(dims.mtp_layers) for rule in _mtp(dims, depth)),
        )
    )


def _mtp(dims: ModelDims, depth: int) -> tuple[ParamMapping, ...]:
    """A multi-token prediction layer, numbered after the decoder layers. It has one residual stream."""
    at = NamePrefix("mtp.", f"{dims.root}layers.{dims.layers + depth}.", None)
    joint: dict[str, Shape] = dict.fromkeys(("enorm.weight", "hnorm.weight", "shared_head.norm.weight"), (dims.hidden,))
    return (
        *at.tensors({**joint, "eh_proj.weight": (dims.hidden, 2 * dims.hidden)}),
        *_sparse_attention(dims, at),
        *moe_mlp(dims, at, shared="shared_experts"),
    )


def _hyper_connections(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """What mixes the residual streams before and after attention and MLP. Biases and scales are float32."""
    at, streams = decoder(dims, dims.all_layers), dims.own
    rows = streams * (streams + 2)
    return tuple(
        at.rule("", {f"hc_{block}_{name}": shape}, fp32=name != "fn")
        for block in ("attn", "ffn")
        for name, shape in {"fn": (rows, streams * dims.hidden), "base": (rows,), "scale": (3,)}.items()
    )


def _sparse_attention(dims: ModelDims, at: NamePrefix) -> tuple[ParamMapping, ...]:
    """Latent attention with the norm before it, and its indexer."""
    indexer, mla = dims.indexer, dims.mla
    assert indexer is not None, "read_dims sets it"
    assert mla is not None, "read_dims sets it"
    size = indexer.head_dim
    parts: dict[str, Shape] = {
        "wq_b.weight": (indexer.heads * size, mla.q_rank or 0),
        "wk.weight": (size, dims.hidden),
        "weights_proj.weight": (indexer.heads, dims.hidden),
        "k_norm.weight": (size,),
        "k_norm.bias": (size,),
        "index_kpool_compress_ape": (indexer.pool, size),
        "index_kpool_compress_gate": (size, dims.hidden),
    }
    return (
        *mla_attention(dims, at),
        *at.tensors({f"self_attn.indexer.{name}": shape for name, shape in parts.items()}),
    )


FAMILIES = (
    ModelFamily(
        ("glm5_next",),
        ("Glm5NextForConditionalGeneration",),
        read_dims,
        mappings,
        carried=("model.visual.",),
        # No class of transformers 5.12 says which of its modules are Linear layers.
        release=None,
        unwitnessed=Unwitnessed("its delta attention, hyper-connections and pooled indexer are in none", None),
    ),
)
