"""DeepSeek-V4: compressed attention, several residual streams, and first layers whose experts a table chooses.

The table `tid2eid` says by a token's id which experts it goes to: it is part of the model, and nothing computes it.
Megatron-LM has these modules only after its release 0.19. Megatron-Bridge and miles name them differently and cut
`wo_a` differently, so the rules have HF's names on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.core.errors import CkptkitError
from ckptkit.core.printable import shortened
from converters.blocks.decoder import W1_W3_W2, embeddings, gated_mlp, layer_count
from converters.config.compressed import DENSE, SPARSE, WINDOW, CompressedAttention, read_compressed
from converters.config.dims import ModelDims, base_dims, first_layers
from converters.config.values import integer, number
from converters.family import Draft, EngineClass, ModelFamily, Release, Unwitnessed
from converters.rules import NamePrefix, ParamMapping, decoder, unnamed

# What the releases say, where readers compute nothing else or disagree.
_ONLY = {
    "attention_bias": False,
    "mlp_bias": False,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
}
_HASHED = "hash_moe"


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a deepseek_v4 config. Source: transformers `DeepseekV4Config`, SGLang `models/deepseek_v4.py`.

    Raises CkptkitError for what no release has and readers read differently.
    """
    for key, value in _ONLY.items():
        if config.get(key, value) not in (None, value):
            raise CkptkitError(
                f"config.json: deepseek_v4 with {key} {shortened(config[key])} is not supported",
                f"the releases are with {value}",
                code="unsupported",
            )
    if drafts := sorted(key for key in config if key.startswith("dspark_")):
        raise CkptkitError(
            f"config.json: deepseek_v4 with {drafts[0]} is not supported",
            "multi-token prediction layers of DSpark are others than those of the first releases",
            code="unsupported",
        )
    expert_ffn = integer(config, "moe_intermediate_size")
    dims = base_dims(
        {"rms_norm_eps": 1e-6, **config, "intermediate_size": expert_ffn, "num_key_value_heads": 1},
        qkv_bias=False,
        qk_norm=False,
        root="",
        head="head.weight",
        tied=False,
        rope_interleaved=True,
        rotary_fraction=_rotary_fraction(config),
        sinks=True,
        window=integer(config, "sliding_window"),
        compressed=read_compressed(config),
        streams=integer(config, "hc_mult"),
        hashed_layers=_hashed_layers(config),
        mtp_layers=integer(config, "num_nextn_predict_layers", 0),
        experts=integer(config, "n_routed_experts"),
        top_k=integer(config, "num_experts_per_tok"),
        expert_ffn=expert_ffn,
        shared_ffn=expert_ffn,
        router_bias=True,
        router_scale=number(config, "routed_scaling_factor"),
    )
    if dims.mtp_layers > 1:
        raise CkptkitError(
            f"config.json: deepseek_v4 with num_nextn_predict_layers {dims.mtp_layers} is not supported",
            "the releases have 1, and SGLang builds no more",
            code="unsupported",
        )
    return dims


def _rotary_fraction(config: Mapping[str, Any]) -> float:
    """The part of a head that turns. Raises CkptkitError where both spellings of it disagree."""
    head_dim, key = integer(config, "head_dim"), "partial_rotary_factor"
    rotary = integer(config, "qk_rope_head_dim", int(number(config, key, 0.125) * head_dim))
    if config.get(key) is not None and int(number(config, key) * head_dim) != rotary:
        raise CkptkitError(
            f"config.json: qk_rope_head_dim is {rotary} of {head_dim} but {key} is {config[key]}",
            "SGLang reads the first and transformers the second; make them agree",
        )
    return rotary / max(head_dim, 1)


def _hashed_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers with a table: `num_hash_layers` of the releases, `mlp_layer_types` of transformers.

    miles reads `n_hash_layers`. Raises CkptkitError where two of them disagree.
    """
    layers, kinds = integer(config, "num_hidden_layers"), config.get("mlp_layer_types")
    counted = kinds.count(_HASHED) if isinstance(kinds, list) else 3
    count = integer(config, "num_hash_layers", integer(config, "n_hash_layers", counted))
    expected = [_HASHED] * min(count, layers) + ["moe"] * (layers - count)
    if kinds not in (None, expected) or integer(config, "n_hash_layers", count) != count:
        key = "n_hash_layers" if kinds in (None, expected) else "mlp_layer_types"
        raise CkptkitError(
            f"config.json: {key} is {shortened(config[key])}, but num_hash_layers {count} of {layers}",
            "SGLang and vLLM read num_hash_layers, transformers mlp_layer_types, miles n_hash_layers; make them agree",
        )
    found = first_layers({"num_hash_layers": count}, "num_hash_layers", count)
    return tuple(layer for layer in found if layer < layers)


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    """All tensors of a deepseek_v4 model."""
    sizes = dims.compressed
    assert sizes is not None, "read_dims gives every model of this family its attention"
    every, hashed = decoder(dims, dims.all_layers), set(dims.hashed_layers)
    table = {"ffn.gate.tid2eid": (dims.vocab, dims.top_k)}
    rules = [
        *embeddings(dims, name="embed"),
        *_streams_joined(dims, NamePrefix("", "", None)),
        *_layer(dims, sizes, every),
        *_compressor(dims, decoder(dims, sizes.layers(SPARSE)), "attn.", SPARSE, dims.head_dim),
        *_compressor(dims, decoder(dims, sizes.layers(DENSE)), "attn.", DENSE, dims.head_dim),
        *_indexer(dims, sizes, decoder(dims, sizes.layers(SPARSE))),
        decoder(dims, dims.hashed_layers).rule("", table, indices=True),
        _bias(dims, decoder(dims, [layer for layer in dims.all_layers if layer not in hashed])),
    ]
    for depth in range(dims.mtp_layers):
        at = NamePrefix("", f"mtp.{depth}.", None)
        rules += [*_layer(dims, sizes, at), _bias(dims, at), *_streams_joined(dims, at)]
        rules += [at.rule("", {f"{name}.weight": (dims.hidden,)}) for name in ("enorm", "hnorm", "norm")]
        rules += [at.rule("", {f"{name}.weight": (dims.hidden, dims.hidden)}) for name in ("e_proj", "h_proj")]
    return unnamed(rules)


def _layer(dims: ModelDims, sizes: CompressedAttention, at: NamePrefix) -> list[ParamMapping]:
    """What every layer has: attention over a window, experts, and how both read and write the residual streams."""
    hidden, rank, width = dims.hidden, sizes.query_rank, dims.heads * dims.head_dim
    joined, ffn = sizes.output_groups * sizes.output_rank, "ffn."
    shapes = {
        "attn_norm.weight": (hidden,),
        "attn.wq_a.weight": (rank, hidden),
        "attn.q_norm.weight": (rank,),
        "attn.wq_b.weight": (width, rank),
        "attn.wkv.weight": (dims.head_dim, hidden),
        "attn.kv_norm.weight": (dims.head_dim,),
        "attn.wo_a.weight": (joined, width // sizes.output_groups),
        "attn.wo_b.weight": (hidden, joined),
        "ffn_norm.weight": (hidden,),
    }
    return [
        *(at.rule("", {name: shape}) for name, shape in shapes.items()),
        at.rule("", {"attn.attn_sink": (dims.heads,)}, fp32=True),
        *(rule for half in ("attn", "ffn") for rule in _streams(dims, at, f"hc_{half}_", 2 + dims.streams, 3)),
        at.rule("", {f"{ffn}gate.weight": (dims.experts, hidden)}, kind="Router"),
        *gated_mlp(at, "", f"{ffn}experts.{{expert}}.", hidden, dims.expert_ffn, W1_W3_W2),
        *gated_mlp(at, "", f"{ffn}shared_experts.", hidden, dims.shared_ffn, W1_W3_W2),
    ]


def _streams(dims: ModelDims, at: NamePrefix, prefix: str, each: int, scales: int) -> list[ParamMapping]:
    """Hyper-connections: `each` weights a residual stream, made of all streams, their offsets and factors."""
    rows = each * dims.streams
    shapes = {"fn": (rows, dims.streams * dims.hidden), "base": (rows,), "scale": (scales,)}
    return [at.rule("", {prefix + name: shape}, fp32=True) for name, shape in shapes.items()]


def _streams_joined(dims: ModelDims, at: NamePrefix) -> list[ParamMapping]:
    """How the residual streams become one before the final norm."""
    return _streams(dims, at, "hc_head_", 1, 1)


def _compressor(dims: ModelDims, at: NamePrefix, place: str, ratio: int, width: int) -> list[ParamMapping]:
    """What makes one key of `ratio` tokens; where the windows of two keys overlap, it is twice as wide."""
    rows = 2 * width if ratio == SPARSE else width
    name = f"{place}compressor."
    return [
        at.rule("", {f"{name}ape": (ratio, rows)}, fp32=True),
        at.rule("", {f"{name}wkv.weight": (rows, dims.hidden)}),
        at.rule("", {f"{name}wgate.weight": (rows, dims.hidden)}),
        at.rule("", {f"{name}norm.weight": (width,)}),
    ]


def _indexer(dims: ModelDims, sizes: CompressedAttention, at: NamePrefix) -> list[ParamMapping]:
    """What chooses among the compressed keys, by keys of its own."""
    name, rows = "attn.indexer.", sizes.index_heads * sizes.index_dim
    return [
        at.rule("", {f"{name}wq_b.weight": (rows, sizes.query_rank)}),
        at.rule("", {f"{name}weights_proj.weight": (sizes.index_heads, dims.hidden)}),
        *_compressor(dims, at, name, SPARSE, sizes.index_dim),
    ]


def _bias(dims: ModelDims, at: NamePrefix) -> ParamMapping:
    """Of a router that no table replaces."""
    return at.rule("", {"ffn.gate.bias": (dims.experts,)}, fp32=True)


def _sglang_keys(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """SGLang and vLLM read the layers' kinds under the names of the release alone."""
    dims = read_dims(text)
    assert dims.compressed is not None, "read_dims gives every model of this family its attention"
    ratios = [*dims.compressed.ratios, *[WINDOW] * dims.mtp_layers]
    return {"compress_ratios": ratios, "num_hash_layers": len(dims.hashed_layers), "topk_method": "noaux_tc"}


def _drafts(text: Mapping[str, Any], root: str) -> tuple[Draft, ...]:
    """The multi-token prediction layer, where the config promises one. Its joining projections are in FP8 too."""
    at = "mtp.0."
    own = (f"{at}e_proj", f"{at}h_proj")
    return (Draft(at, "model.decoder.", r"re:mtp\..*", at, "", own=own),) * bool(
        layer_count(text, "num_nextn_predict_layers")
    )


# What compresses keys, and weighs heads of the indexer: in BF16 in every release, and engines ask no list about it.
_KEPT = (".compressor.wkv", ".compressor.wgate", ".indexer.weights_proj")
_MLP = (("w1", "gate_up_proj"), ("w3", "gate_up_proj"), ("w2", "down_proj"))
_IN_SGLANG = (("attn", "self_attn"), ("ffn", "mlp"), ("wq_a", "wqkv_a"), ("wkv", "wqkv_a"), *_MLP)
_IN_VLLM = (("wq_a", "fused_wqa_wkv"), ("wkv", "fused_wqa_wkv"), *_MLP)
FAMILIES = (
    ModelFamily(
        ("deepseek_v4",),
        ("DeepseekV4ForCausalLM",),
        read_dims,
        mappings,
        release=Release(
            root="",
            head="head",
            moe="ffn",
            experts=W1_W3_W2,
            drafts=_drafts,
            own_tree=True,
            kept=_KEPT,
            fp8_only=True,
            stated={"expert_dtype": "fp8"},  # vLLM takes experts in MXFP4 without it
        ),
        spellings={
            "model.hc_head.hc_fn": "transformers' own modules",
            "model.hc_head_fn": "the modules of SGLang and miles",
        },
        engines={
            "sglang": EngineClass(root=("layers.", "model.layers."), inside=_IN_SGLANG, keys=_sglang_keys),
            "vllm": EngineClass(inside=_IN_VLLM, cache_dtype="fp8"),
        },
        unwitnessed=Unwitnessed(
            "megatron-core 0.19 has no compressed attention, hyper-connections or tables of experts", None
        ),
    ),
)
