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
from converters.blocks.kda import kda
from converters.blocks.latent_attention import mla_attention, read_mla
from converters.blocks.sigmoid_moe import dense_of_kinds, read_sigmoid_moe
from converters.config.dims import Indexer, Kda, ModelDims, base_dims
from converters.config.values import integer, text_part
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
    for key, wanted in _FIXED.items():
        if inner.get(key, wanted) != wanted:
            raise _refused(key, inner[key], f"the release has {wanted!r}")
    for value in (text["tie_word_embeddings"], inner.get("tie_word_embeddings", False)):
        if value is not False:
            raise _refused("tie_word_embeddings", value, "the release has its own output layer")
    linear = _kda_layers(text)
    dims = base_dims(
        {key: value for key, value in text.items() if key != "head_dim"},
        qkv_bias=False,
        qk_norm=False,
        root=root,
        rotary=False,
        mla=read_mla(text, rotary=False),
        kda=_kda(text),
        mixer_layers=linear,
        dense_layers=_dense_layers(text),
        streams=integer(text, "hc_mult"),
        mtp_layers=integer(text, "num_nextn_predict_layers", 0),
        **read_sigmoid_moe(text, absent={}),
    )
    return _with_indexer(dims, text)


def _refused(key: str, value: Any, why: str) -> CkptkitError:
    return CkptkitError(
        f"config.json: glm5_next with {key} {shortened(value)} is not supported", why, code="unsupported"
    )


def _kda_layers(text: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers with KDA, from 0. Raises CkptkitError for a list that is not one word a layer, or that another denies."""
    layers, kinds = integer(text, "num_hidden_layers"), text.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (_LINEAR, *_SPARSE) for kind in kinds):
        raise CkptkitError(
            f"config.json: layer_types is {shortened(kinds)}, "
            f"not a list of {_LINEAR} or {_SPARSE[0]} for {layers} layers",
            "compare it with the release",
        )
    found = tuple(layer for layer, kind in enumerate(kinds) if kind == _LINEAR)
    stated = (text.get("linear_attn_config") or {}).get("kda_layers")
    if stated is not None and stated != list(found):
        raise CkptkitError(
            f"config.json: layer_types has KDA in layers {shortened(list(found))}, but kda_layers is "
            f"{shortened(stated)}",
            "transformers reads the first, engines the second; make them agree",
        )
    return found


def _kda(text: Mapping[str, Any]) -> Kda:
    """Sizes of KDA under either spelling. Raises CkptkitError where both are there and disagree."""
    given = text.get("linear_attn_config") or {}
    if not isinstance(given, Mapping):
        raise CkptkitError(f"config.json: linear_attn_config is {shortened(given)}", "compare it with the release")
    sizes = []
    for key, other in _KDA.items():
        stated = [integer(place, name) for place, name in ((given, key), (text, other)) if place.get(name) is not None]
        if len(set(stated)) != 1:
            raise CkptkitError(
                f"config.json: {key} of linear_attn_config and {other} are {shortened(stated)}, not one number",
                "readers look at one or the other; take both from the release",
            )
        sizes.append(stated[0])
    return Kda(*sizes)


def _dense_layers(text: Mapping[str, Any]) -> tuple[int, ...]:
    """The dense layers by `mlp_layer_types`, without which readers disagree."""
    dense = dense_of_kinds(text)
    if dense is None:
        raise CkptkitError("config.json has no 'mlp_layer_types'", "readers take 1 or 3 dense layers without it")
    first = text.get("first_k_dense_replace")
    if first is not None and dense != tuple(range(integer(text, "first_k_dense_replace"))):
        raise CkptkitError(
            f"config.json: first_k_dense_replace is {first}, but by mlp_layer_types layers {list(dense)} are dense",
            "readers look at one or the other; make them agree",
        )
    return dense


def _with_indexer(dims: ModelDims, text: Mapping[str, Any]) -> ModelDims:
    """The sizes with those of the indexer, which every layer without KDA has."""
    kinds = text.get("indexer_types")
    if kinds is not None and kinds != ["full"] * dims.layers:
        raise _refused("indexer_types", kinds, "the release has an indexer of its own in every layer without KDA")
    indexer = Indexer(
        heads=integer(text, "index_n_heads"),
        head_dim=integer(text, "index_head_dim"),
        top_k=integer(text, "index_topk"),
        layers=dims.softmax_layers,
        pool=integer(text, "index_kpool"),
    )
    if indexer.pool < 1:
        raise _refused("index_kpool", indexer.pool, "compare it with the release")
    if text["q_lora_rank"] is None:
        raise _refused("q_lora_rank", None, "the indexer takes compressed queries")
    return replace(dims, indexer=indexer)


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
            *moe_mlp(dims, "shared_experts"),
            *(rule for depth in range(dims.mtp_layers) for rule in _mtp(dims, depth)),
        )
    )


def _mtp(dims: ModelDims, depth: int) -> tuple[ParamMapping, ...]:
    """A multi-token prediction layer, numbered after the decoder layers. It has one residual stream."""
    at = NamePrefix("mtp.", f"{dims.root}layers.{dims.layers + depth}.", None)
    joint: dict[str, Shape] = dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), (dims.hidden,))
    joint |= {"eh_proj": (dims.hidden, 2 * dims.hidden)}
    return (
        *(at.rule("", {f"{name}.weight": shape}) for name, shape in joint.items()),
        *_sparse_attention(dims, at),
        *moe_mlp(dims, "shared_experts", at),
    )


def _hyper_connections(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """What mixes the residual streams before and after attention and MLP. Biases and scales are float32."""
    at, count = decoder(dims, dims.all_layers), dims.streams
    rows = count * (count + 2)
    return tuple(
        at.rule("", {f"hc_{block}_{name}": shape}, fp32=name != "fn")
        for block in ("attn", "ffn")
        for name, shape in {"fn": (rows, count * dims.hidden), "base": (rows,), "scale": (3,)}.items()
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
        *(at.rule("", {f"self_attn.indexer.{name}": shape}) for name, shape in parts.items()),
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
