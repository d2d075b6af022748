"""MiniMax-M3: MiniMax-M2's experts beside a shared one, first layers dense, an indexer that chooses blocks of keys.

Norms are stored minus one, gate and up are clamped as in GPT-OSS, and the router's weights are float32. config.json
speaks of multi-token prediction modules, of which the published weights hold none.

Megatron-Bridge has its weights in a GPTModel, which does not run the indexer: that is a model of its own for 2,048
tokens at most. It keeps the indexer in `lightning_indexers` of its whole model and nowhere in the text model, so the
rules have HF's names on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptkit.core.errors import CkptkitError
from converters.blocks.decoder import W1_W3_W2, attention, dense_mlp, embeddings, moe_mlp
from converters.config.dims import Indexer, ModelDims, base_dims
from converters.config.values import (
    agreed,
    agreed_by_layer,
    integer,
    kinds_of_layers,
    number,
    places,
    require,
    rotary_fraction,
    text_part,
    unsupported,
)
from converters.family import EngineClass, ModelFamily, Release, Unwitnessed
from converters.ops.shapes import Shape
from converters.rules import ParamMapping, decoder, unnamed

_ROOT = "language_model."
# What the release says, of the language model and of its sparse attention; readers compute nothing else or disagree.
_ONLY = {
    "hidden_act": ("swigluoai", "silu"),  # transformers writes the second, and computes the first
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "attention_output_gate": False,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "n_shared_experts": 1,
    "tie_word_embeddings": False,
}
_ONLY_SPARSE = {"use_sparse_attention": True, "sparse_score_type": "max", "sparse_init_block": 0}
# Sizes of the indexer in both spellings: the release's and transformers'.
_INDEXER = (
    ("sparse_num_index_heads", "index_n_heads"),
    ("sparse_index_dim", "index_head_dim"),
    ("sparse_topk_blocks", "index_topk_blocks"),
)
_NO_VALUES = "sparse_disable_index_value"
_FLAGS = {0: False, 1: True}
# As transformers calls what the release has as 0 and 1.
_MLP, _ATTENTION = {"dense": False, "sparse": True}, {"full_attention": False, "minimax_m3_sparse": True}


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a minimax_m3_vl config. Source: transformers `MiniMaxM3VLTextConfig`, SGLang `models/minimax_m3.py`.

    Raises CkptkitError for what no release has, and where two spellings of one thing disagree.
    """
    text, _ = text_part(config)
    stated = text.get("sparse_attention_config")
    sparse = stated if isinstance(stated, Mapping) else {}
    both = {**text, **sparse}
    require(text, "minimax_m3_vl", _ONLY)
    require(sparse, "minimax_m3_vl", _ONLY_SPARSE)
    head_dim, ffn = integer(text, "head_dim"), integer(text, "intermediate_size")
    # SGLang builds the shared expert as large as the others, and the release has it so.
    require(text, "minimax_m3_vl", {"shared_intermediate_size": ffn})
    routed = _layers_with(both, {"moe_layer_freq": _FLAGS, "mlp_layer_types": _MLP})
    indexed = _layers_with(both, {"sparse_attention_freq": _FLAGS, "layer_types": _ATTENTION})
    heads, index_dim, blocks = (agreed(both, keys) for keys in _INDEXER)
    without = kinds_of_layers(both, _NO_VALUES, (0, 1))
    if without is not None and not set(indexed) <= set(places(without, 1)):
        why = f"the release turns them off in every layer ({_NO_VALUES})"
        raise unsupported("minimax_m3_vl with an indexer that has values", why)
    return base_dims(
        {key: value for key, value in text.items() if key != "hidden_act"}
        | {"intermediate_size": integer(text, "dense_intermediate_size")},
        qk_norm=True,
        default_theta=5e6,
        rotary_fraction=rotary_fraction(text, head_dim),
        activation="quick_geglu",
        root=f"{_ROOT}model.",
        head=f"{_ROOT}lm_head.weight",
        tied=False,
        norm_offset=True,
        indexer=Indexer(heads, index_dim, blocks, indexed),
        dense_layers=tuple(layer for layer in range(integer(text, "num_hidden_layers")) if layer not in routed),
        experts=integer(text, "num_local_experts"),
        top_k=integer(text, "num_experts_per_tok"),
        expert_ffn=ffn,
        shared_ffn=integer(text, "shared_intermediate_size"),
        router_sigmoid=True,
        router_bias=True,
        router_scale=number(text, "routed_scaling_factor", 2.0),
    )


def _layers_with(config: Mapping[str, Any], spellings: Mapping[str, Mapping[Any, bool]]) -> tuple[int, ...]:
    """The layers that have something: a list of 0 and 1 in the release, of two words in transformers' config."""
    kinds = agreed_by_layer(config, spellings)
    if kinds is None:
        key = next(iter(spellings))
        raise CkptkitError(f"config.json has no {key!r}", "a minimax_m3_vl config must state it")
    return places(kinds, True)


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All tensors of the language model of a minimax_m3_vl model."""
    experts = moe_mlp(
        dims, shared="shared_experts", block="block_sparse_moe.", bias="e_score_correction_bias", names=W1_W3_W2
    )
    rules = (
        *embeddings(dims),
        *attention(dims),
        *dense_mlp(dims),
        *(replace(rule, fp32=True) if rule.kind == "Router" else rule for rule in experts),
        *_indexer(dims),
    )
    return unnamed(rules)


def _indexer(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """Queries and keys that choose blocks of keys, with norms of one head's width."""
    sizes = dims.indexer
    assert sizes is not None, "read_dims gives every model of this family an indexer"
    size, hidden = sizes.head_dim, dims.hidden
    shapes: dict[str, Shape] = {"q_proj": (sizes.heads * size, hidden), "k_proj": (size, hidden)}
    shapes |= {"q_norm": (size,), "k_norm": (size,)}
    return decoder(dims, sizes.layers).tensors({f"self_attn.index_{name}.weight": shapes[name] for name in shapes})


def _sglang_keys(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """SGLang reads the release's keys alone; without the first it has experts in every layer."""
    dims = read_dims({"model_type": text["model_type"], "text_config": dict(text)})
    assert dims.indexer is not None, "read_dims gives every model of this family an indexer"
    sparse = {
        "use_sparse_attention": True,
        "sparse_index_dim": dims.indexer.head_dim,
        "sparse_num_index_heads": dims.indexer.heads,
        "sparse_topk_blocks": dims.indexer.top_k,
        "sparse_block_size": integer(text, "index_block_size", 128),
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_local_block": integer(text, "index_local_blocks", 1),
        "sparse_attention_freq": [int(layer in dims.indexer.layers) for layer in dims.all_layers],
        "sparse_disable_index_value": [int(layer in dims.indexer.layers) for layer in dims.all_layers],
    }
    return {
        "moe_layer_freq": [int(layer in dims.moe) for layer in dims.all_layers],
        "sparse_attention_config": sparse,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_gemma_norm": True,
        "qk_norm_type": "per_head",
        "n_shared_experts": 1,
        "num_mtp_modules": 0,
    }


_TOWER_IN_VLLM = (
    (".mlp.fc", ".fc"),
    ("multi_modal_projector.", "vision_tower.multi_modal_projector."),
    ("patch_merge_mlp.", "vision_tower.patch_merge_mlp."),
)
# Both engines join the indexer's projections: SGLang as a layer of their own, vLLM with those of attention.
_IN_SGLANG = (("block_sparse_moe", "mlp"), *((f"index_{one}_proj", "index_qkv_proj") for one in "qk"))
_IN_VLLM = tuple((f"index_{one}_proj", "qkv_proj") for one in "qk")
FAMILIES = (
    ModelFamily(
        ("minimax_m3_vl",),
        ("MiniMaxM3SparseForConditionalGeneration",),
        read_dims,
        mappings,
        carried=("vision_tower.", "multi_modal_projector.", "patch_merge_mlp."),
        release=Release(
            f"{_ROOT}model.",
            f"{_ROOT}lm_head",
            nested=True,
            moe="block_sparse_moe",
            experts=W1_W3_W2,
            own_tree=True,
        ),
        spellings={"model.language_model.embed_tokens.weight": "transformers' own modules"},
        engines={
            "sglang": EngineClass(inside=_IN_SGLANG, keys=_sglang_keys),
            # It takes `weight_scale_inv` for the scales of MXFP8.
            "vllm": EngineClass(inside=_IN_VLLM, outside=_TOWER_IN_VLLM, fp8_blocks=False),
        },
        unwitnessed=Unwitnessed("megatron-core has no indexer that chooses blocks of keys", None),
    ),
)
