"""GLM-5.3-Flash: three of four layers have Kimi delta attention (KDA), the others sparse latent attention.

Latent attention has no rotary embedding, and an indexer that pools keys. Residuals are several streams, which learned
weights mix before and after each block (hyper-connections). A multi-token prediction layer, without those, and a vision
tower come with it. Stacks name these models differently for Megatron, so the rules have HF's names on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.converters.blocks.decoder import dense_mlp, embeddings, moe_mlp
from ckptkit.converters.blocks.latent_attention import mla_attention, read_mla
from ckptkit.converters.blocks.sigmoid_moe import dense_layers, read_sigmoid_moe
from ckptkit.converters.config.dims import Indexer, Kda, ModelDims, base_dims
from ckptkit.converters.config.values import integer, kinds_of_layers, places, text_part
from ckptkit.converters.families.kimi_k3 import kda
from ckptkit.converters.family import MegatronGap, ModelFamily
from ckptkit.converters.ops.shapes import Shape
from ckptkit.converters.rules import NamePrefix, ParamMapping, decoder, with_hf_names

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
    """Sizes of the language model of a glm5_next config. Source: transformers 5.24 `Glm5NextTextConfig`."""
    text, root = text_part(config)
    kinds = kinds_of_layers({**text, "layer_types": text.get("layer_types") or ()}, "layer_types", (_LINEAR, *_SPARSE))
    stated = text.get("linear_attn_config")
    given = stated if isinstance(stated, Mapping) else {}
    dims = base_dims(
        {key: value for key, value in text.items() if key != "head_dim"},
        root=root,
        rotary=False,
        mla=read_mla(text, rotary=False),
        kda=Kda(
            *(integer(given if key in given else text, key if key in given else other) for key, other in _KDA.items())
        ),
        mixer_layers=places(kinds or (), _LINEAR),
        dense_layers=dense_layers(text),
        own=integer(text, "hc_mult"),
        mtp_layers=integer(text, "num_nextn_predict_layers", 0),
        **read_sigmoid_moe(text, absent={}),
    )
    heads, head_dim, top_k, pool = (integer(text, f"index_{key}") for key in ("n_heads", "head_dim", "topk", "kpool"))
    return replace(dims, indexer=Indexer(heads, head_dim, top_k, dims.softmax_layers, pool=pool))


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All tensors of the model, with those of its multi-token prediction layers."""
    linear = decoder(dims, dims.mixers)
    return with_hf_names(
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
        passthrough=("model.visual.",),
        # No class of transformers 5.12 says which of its modules are Linear layers.
        release=None,
        unwitnessed=MegatronGap("Megatron lacks its delta attention, hyper-connections and pooled indexer", None),
    ),
)
