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
from ckptkit.core.printable import shortened
from converters.blocks.decoder import W1_W3_W2, attention, dense_mlp, embeddings, moe_mlp
from converters.config.dims import Indexer, ModelDims, base_dims
from converters.config.values import integer, number, rotary_fraction, text_part
from converters.family import EngineClass, ModelFamily, Release, Unwitnessed
from converters.rules import ParamMapping, decoder, unnamed

_ROOT = "language_model."
# What the release says, of the language model and of its sparse attention; readers compute nothing else or disagree.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("swigluoai", "silu"),  # transformers writes the second, and computes the first
    "swiglu_alpha": (1.702,),
    "swiglu_limit": (7.0,),
    "use_gemma_norm": (True,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_head",),
    "attention_output_gate": (False,),
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "n_shared_experts": (1,),
    "tie_word_embeddings": (False,),
}
_ONLY_SPARSE = {"use_sparse_attention": (True,), "sparse_score_type": ("max",), "sparse_init_block": (0,)}
# Sizes of the indexer in both spellings: the release's and transformers'.
_INDEXER = (
    ("sparse_num_index_heads", "index_n_heads"),
    ("sparse_index_dim", "index_head_dim"),
    ("sparse_topk_blocks", "index_topk_blocks"),
)
_NO_VALUES = "sparse_disable_index_value"
_ATTENTION = ("full_attention", "minimax_m3_sparse")  # as transformers calls the layers without one and with one


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a minimax_m3_vl config. Source: transformers `MiniMaxM3VLTextConfig`, SGLang `models/minimax_m3.py`.

    Raises CkptkitError for what no release has, and where two spellings of one thing disagree.
    """
    text, _ = text_part(config)
    stated = text.get("sparse_attention_config")
    sparse = stated if isinstance(stated, Mapping) else {}
    _check(text, _ONLY)
    _check(sparse, _ONLY_SPARSE)
    layers, head_dim = integer(text, "num_hidden_layers"), integer(text, "head_dim")
    shared, ffn = integer(text, "shared_intermediate_size"), integer(text, "intermediate_size")
    if shared != ffn:
        raise CkptkitError(
            f"config.json: shared_intermediate_size is {shared}, but intermediate_size {ffn}",
            "SGLang builds the shared expert as large as the others, and the release has it so",
            code="unsupported",
        )
    routed = _chosen(text, text, "moe_layer_freq", "mlp_layer_types", ("dense", "sparse"), layers)
    indexed = _chosen(text, sparse, "sparse_attention_freq", "layer_types", _ATTENTION, layers)
    heads, index_dim, blocks = (_size(text, sparse, keys) for keys in _INDEXER)
    without = sparse.get(_NO_VALUES)
    if without is not None and not set(indexed) <= set(_places(_NO_VALUES, without, (0, 1), layers)):
        raise CkptkitError(
            "config.json: minimax_m3_vl with an indexer that has values is not supported",
            f"the release turns them off in every layer ({_NO_VALUES})",
            code="unsupported",
        )
    return base_dims(
        {key: value for key, value in text.items() if key != "hidden_act"}
        | {"intermediate_size": integer(text, "dense_intermediate_size")},
        qkv_bias=False,
        qk_norm=True,
        default_theta=5e6,
        rotary_fraction=rotary_fraction(text, head_dim),
        activation="quick_geglu",
        root=f"{_ROOT}model.",
        head=f"{_ROOT}lm_head.weight",
        tied=False,
        norm_offset=True,
        indexer=Indexer(heads, index_dim, blocks, indexed),
        dense_layers=tuple(layer for layer in range(layers) if layer not in routed),
        experts=integer(text, "num_local_experts"),
        top_k=integer(text, "num_experts_per_tok"),
        expert_ffn=ffn,
        shared_ffn=shared,
        router_sigmoid=True,
        router_bias=True,
        router_scale=number(text, "routed_scaling_factor", 2.0),
    )


def _check(part: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]]) -> None:
    for key, known in only.items():
        if part.get(key) not in (None, *known):
            raise CkptkitError(
                f"config.json: minimax_m3_vl with {key} {shortened(part[key])} is not supported",
                f"the release is with {known[0]}",
                code="unsupported",
            )


def _chosen(
    text: Mapping[str, Any], place: Mapping[str, Any], key: str, kinds_key: str, kinds: tuple[str, str], layers: int
) -> tuple[int, ...]:
    """The layers that have something: a list of 0 and 1 in the release, of two words in transformers' config.

    Raises CkptkitError for other lists, where neither is stated, and where both are and disagree.
    """
    found: dict[str, tuple[int, ...]] = {}
    several: tuple[tuple[str, Any, tuple[Any, Any]], ...] = (
        (key, place.get(key), (0, 1)),
        (kinds_key, text.get(kinds_key), kinds),
    )
    for name, values, known in several:
        if values is not None:
            found[name] = _places(name, values, known, layers)
    if not found:
        raise CkptkitError(f"config.json has no {key!r}", "a minimax_m3_vl config must state it")
    if len(set(found.values())) > 1:
        raise CkptkitError(
            f"config.json: {key} and {kinds_key} name different layers",
            "SGLang and vLLM read the first, transformers the second; make them agree",
        )
    return next(iter(found.values()))


def _places(name: str, values: Any, known: tuple[Any, Any], layers: int) -> tuple[int, ...]:
    """The layers for which a list has the second of two known values. Raises CkptkitError for another list."""
    if not isinstance(values, list) or len(values) != layers or any(value not in known for value in values):
        raise CkptkitError(
            f"config.json: {name} is {shortened(values)}, not a list of {known} for {layers} layers",
            "compare it with the release",
        )
    return tuple(layer for layer, value in enumerate(values) if value == known[1])


def _size(text: Mapping[str, Any], sparse: Mapping[str, Any], keys: tuple[str, str]) -> int:
    """A size of the indexer. Raises CkptkitError where both spellings of it disagree."""
    ours, theirs = keys
    size = integer(sparse, ours, text.get(theirs)) if ours in sparse else integer(text, theirs)
    if integer(text, theirs, size) != size:
        raise CkptkitError(
            f"config.json: {ours} is {size} but {theirs} is {text[theirs]}",
            "SGLang and vLLM read the first, transformers the second; make them agree",
        )
    return size


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All tensors of the language model of a minimax_m3_vl model."""
    experts = moe_mlp(dims, "shared_experts", block="block_sparse_moe.", bias="e_score_correction_bias", names=W1_W3_W2)
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
    at, norm = decoder(dims, sizes.layers), (sizes.head_dim,)
    return (
        at.rule("", {"self_attn.index_q_proj.weight": (sizes.heads * sizes.head_dim, dims.hidden)}),
        at.rule("", {"self_attn.index_k_proj.weight": (sizes.head_dim, dims.hidden)}),
        at.rule("", {"self_attn.index_q_norm.weight": norm}),
        at.rule("", {"self_attn.index_k_norm.weight": norm}),
    )


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
