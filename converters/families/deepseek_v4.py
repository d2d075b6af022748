"""DeepSeek-V4: compressed attention, several residual streams, and a table that selects experts in the first layers.

The table `tid2eid` maps a token's id to experts; it is part of the model and cannot be computed.
Megatron-LM has these modules only after its release 0.19. Megatron-Bridge and miles name them differently and cut
`wo_a` differently, so the rules have HF's names on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.converters.blocks.decoder import W1_W3_W2, embeddings, gated_mlp, layer_count
from ckptkit.converters.config.dims import ModelDims, base_dims, first_layers, require_positive
from ckptkit.converters.config.values import integer, kinds_of_layers, places, require, unsupported
from ckptkit.converters.family import Draft, MegatronGap, ModelFamily, Release
from ckptkit.converters.ops.shapes import Shape
from ckptkit.converters.rules import NamePrefix, ParamMapping, decoder, with_hf_names
from ckptkit.core.errors import CkptkitError

_WINDOW, _SPARSE, _DENSE = 0, 4, 128  # tokens per compressed key; 0: attention sees only a window
# transformers' names for them.
_KINDS = {"sliding_attention": _WINDOW, "compressed_sparse_attention": _SPARSE, "heavily_compressed_attention": _DENSE}


@dataclass(frozen=True)
class _Own:
    """Ranks of both compressed projections, groups of heads in the output projection, the indexer's heads, and the
    residual streams, which hyper-connections mix.

    `ratios`: tokens per compressed key for each layer. `hashed`: the layers with a table.
    """

    query_rank: int
    output_rank: int
    output_groups: int
    index_heads: int
    index_dim: int
    streams: int
    ratios: tuple[int, ...]
    hashed: tuple[int, ...]

    def __post_init__(self) -> None:
        require_positive(self)


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a deepseek_v4 config. Source: transformers `DeepseekV4Config`, SGLang `models/deepseek_v4.py`."""
    require(config, "deepseek_v4", {"n_shared_experts": 1, "num_nextn_predict_layers": (1, 0)})
    if drafts := sorted(key for key in config if key.startswith("dspark_")):
        why = "ckptkit reads the multi-token prediction layers of the first releases, not those of DSpark"
        raise unsupported(f"deepseek_v4 with {drafts[0]}", why)
    layers, expert_ffn = integer(config, "num_hidden_layers"), integer(config, "moe_intermediate_size")
    hashed = min(integer(config, "num_hash_layers", 3), layers)
    own = _Own(
        query_rank=integer(config, "q_lora_rank"),
        output_rank=integer(config, "o_lora_rank"),
        output_groups=integer(config, "o_groups"),
        index_heads=integer(config, "index_n_heads"),
        index_dim=integer(config, "index_head_dim"),
        streams=integer(config, "hc_mult"),
        ratios=_ratios(config, layers),
        hashed=first_layers({"num_hash_layers": hashed}, "num_hash_layers", 0),
    )
    return base_dims(
        {"rms_norm_eps": 1e-6, **config, "intermediate_size": expert_ffn, "num_key_value_heads": 1},
        root="",
        head="head.weight",
        tied=False,
        mtp_layers=integer(config, "num_nextn_predict_layers", 0),
        experts=integer(config, "n_routed_experts"),
        top_k=integer(config, "num_experts_per_tok"),
        expert_ffn=expert_ffn,
        shared_ffn=expert_ffn,
        own=own,
    )


def _ratios(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """`compress_ratios` of the releases, or `layer_types` of transformers, without the layer after the others."""
    for key, known in (("compress_ratios", {ratio: ratio for ratio in _KINDS.values()}), ("layer_types", _KINDS)):
        if isinstance(stated := config.get(key), list):
            kinds = kinds_of_layers({**config, key: stated[:layers]}, key, tuple(known)) or ()
            return tuple(known[kind] for kind in kinds)
    raise CkptkitError("config.json has no 'compress_ratios'", "restore it: a deepseek_v4 config requires it")


def mappings(dims: ModelDims) -> tuple[ParamMapping, ...]:
    own: _Own = dims.own
    sparse, dense = (decoder(dims, places(own.ratios, ratio)) for ratio in (_SPARSE, _DENSE))
    rules = [
        *embeddings(dims, name="embed"),
        *_streams(dims, NamePrefix("", "", None), "hc_head_", 1, 1),
        *_layer(dims, decoder(dims, dims.all_layers)),
        *_compressor(dims, sparse, "attn.", _SPARSE, dims.head_dim),
        *_compressor(dims, dense, "attn.", _DENSE, dims.head_dim),
        *_indexer(dims, sparse),
        decoder(dims, own.hashed).rule("", {"ffn.gate.tid2eid": (dims.vocab, dims.top_k)}, indices=True),
        *_bias(dims, decoder(dims, [layer for layer in dims.all_layers if layer not in own.hashed])),
    ]
    for depth in range(dims.mtp_layers):
        at, size = NamePrefix("", f"mtp.{depth}.", None), dims.hidden
        joint: dict[str, Shape] = {f"{name}.weight": (size,) for name in ("enorm", "hnorm", "norm")}
        joint |= {f"{name}.weight": (size, size) for name in ("e_proj", "h_proj")}
        rules += [*_layer(dims, at), *_bias(dims, at), *_streams(dims, at, "hc_head_", 1, 1), *at.tensors(joint)]
    return with_hf_names(rules)


def _layer(dims: ModelDims, at: NamePrefix) -> list[ParamMapping]:
    """Tensors of every layer: attention over a window, experts, and their access to the residual streams."""
    own: _Own = dims.own
    hidden, rank, width = dims.hidden, own.query_rank, dims.heads * dims.head_dim
    joined, ffn = own.output_groups * own.output_rank, "ffn."
    shapes = {
        "attn_norm.weight": (hidden,),
        "attn.wq_a.weight": (rank, hidden),
        "attn.q_norm.weight": (rank,),
        "attn.wq_b.weight": (width, rank),
        "attn.wkv.weight": (dims.head_dim, hidden),
        "attn.kv_norm.weight": (dims.head_dim,),
        "attn.wo_a.weight": (joined, width // own.output_groups),
        "attn.wo_b.weight": (hidden, joined),
        "ffn_norm.weight": (hidden,),
    }
    return [
        *at.tensors(shapes),
        *at.tensors({"attn.attn_sink": (dims.heads,)}, fp32=True),
        *(rule for half in ("attn", "ffn") for rule in _streams(dims, at, f"hc_{half}_", 2 + own.streams, 3)),
        *at.tensors({f"{ffn}gate.weight": (dims.experts, hidden)}, kind="Router"),
        *gated_mlp(at, "", f"{ffn}experts.{{expert}}.", hidden, dims.expert_ffn, W1_W3_W2),
        *gated_mlp(at, "", f"{ffn}shared_experts.", hidden, dims.shared_ffn, W1_W3_W2),
    ]


def _streams(dims: ModelDims, at: NamePrefix, prefix: str, each: int, scales: int) -> tuple[ParamMapping, ...]:
    """Hyper-connections: `each` weights per residual stream, computed from all streams, with offsets and factors.

    With one weight each, the streams are joined before the final norm.
    """
    rows = each * dims.own.streams
    shapes = {"fn": (rows, dims.own.streams * dims.hidden), "base": (rows,), "scale": (scales,)}
    return at.tensors({prefix + name: shape for name, shape in shapes.items()}, fp32=True)


def _compressor(dims: ModelDims, at: NamePrefix, place: str, ratio: int, width: int) -> tuple[ParamMapping, ...]:
    """Compresses `ratio` tokens to one key; twice as wide if the windows of two keys overlap."""
    rows, name = 2 * width if ratio == _SPARSE else width, f"{place}compressor."
    weights = {"wkv": (rows, dims.hidden), "wgate": (rows, dims.hidden), "norm": (width,)}
    return (
        *at.tensors({f"{name}ape": (ratio, rows)}, fp32=True),
        *at.tensors({f"{name}{part}.weight": shape for part, shape in weights.items()}),
    )


def _indexer(dims: ModelDims, at: NamePrefix) -> tuple[ParamMapping, ...]:
    name, own = "attn.indexer.", dims.own
    queries = {f"{name}wq_b.weight": (own.index_heads * own.index_dim, own.query_rank)}
    return (
        *at.tensors({**queries, f"{name}weights_proj.weight": (own.index_heads, dims.hidden)}),
        *_compressor(dims, at, name, _SPARSE, own.index_dim),
    )


def _bias(dims: ModelDims, at: NamePrefix) -> tuple[ParamMapping, ...]:
    return at.tensors({"ffn.gate.bias": (dims.experts,)}, fp32=True)


def _drafts(text: Mapping[str, Any], root: str) -> tuple[Draft, ...]:
    """The multi-token prediction layer, if the config declares one. Its joining projections are also in FP8."""
    at = "mtp.0."
    own = (f"{at}e_proj", f"{at}h_proj")
    return (Draft(at, "model.decoder.", r"re:mtp\..*", at, "", own=own),) * bool(
        layer_count(text, "num_nextn_predict_layers")
    )


# Modules that compress keys or weight indexer heads: BF16 in every release, never looked up in `ignore`.
_KEPT = (".compressor.wkv", ".compressor.wgate", ".indexer.weights_proj")
FAMILIES = (
    ModelFamily(
        ("deepseek_v4",),
        ("DeepseekV4ForCausalLM",),
        read_dims,
        mappings,
        release=Release(root="", head="head", moe="ffn", experts=W1_W3_W2, drafts=_drafts, own_tree=True, kept=_KEPT),
        unwitnessed=MegatronGap(
            "megatron-core 0.19 has no compressed attention, hyper-connections or tables of experts", None
        ),
    ),
)
