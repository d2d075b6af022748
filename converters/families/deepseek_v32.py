"""DeepSeek V3.2, and GLM-5, 5.1 and 5.2.

DeepSeek V3 with an indexer in every layer (also MTP) that selects the tokens for attention. In GLM-5 it rotates
dimensions in pairs, and in GLM-5.2 most layers share an indexer.

An indexer head is [rotary dimensions | other dimensions] in the releases. From megatron-core 0.19 on, Megatron's
indexer accepts both rotations. Older versions rotated the last dimensions, in pairs, so they compute another model from
the same tensors (lab/mappings.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptkit.converters.blocks.decoder import ROTARY_FREQUENCIES, appended_drafts, multi_token_prediction
from ckptkit.converters.blocks.latent_attention import read_mla
from ckptkit.converters.blocks.sigmoid_moe import ABSENT, dense_layers, read_sigmoid_moe
from ckptkit.converters.config.dims import Indexer, Mla, ModelDims, base_dims
from ckptkit.converters.config.values import agreed_by_layer, flag, integer, places, require, unsupported
from ckptkit.converters.families import deepseek_v3
from ckptkit.converters.family import ModelFamily, Release
from ckptkit.converters.ops.basic import Copy, OneToOne, Op
from ckptkit.converters.rules import NamePrefix, ParamMapping, decoder
from ckptkit.core.errors import CkptkitError

if TYPE_CHECKING:
    from torch import Tensor

# Keys that change the indexer, with the values that have no effect.
_ONLY = {
    "index_k_norm_type": "layer",
    "index_init_tokens": 0,
    "index_local_tokens": 0,
    "cli_factor": 1,
    "index_kpool": None,
}
_KINDS = {"F": True, "full": True, "S": False, "shared": False}


@dataclass(frozen=True)
class RotaryLast(OneToOne):
    """Rows of indexer heads, `head_dim` each: Megatron has the first `rope` of every head last. Not sharded."""

    head_dim: int
    rope: int

    def forward(self, tensor: Tensor) -> Tensor:
        return self._roll(tensor, -self.rope)

    def back(self, tensor: Tensor) -> Tensor:
        return self._roll(tensor, self.rope)

    def _roll(self, tensor: Tensor, by: int) -> Tensor:
        return tensor.reshape(-1, self.head_dim, *tensor.shape[1:]).roll(by, dims=1).reshape(tensor.shape)


def read_indexer(config: Mapping[str, Any], mla: Mla, *, interleaved: bool | None) -> Indexer:
    """Sizes and layers of the indexer. `interleaved`: default of `indexer_rope_interleave`, or None if it is required.

    Raises CkptkitError for an indexer that Megatron does not support, or that transformers and SGLang read differently.
    """
    require(config, "an indexer", _ONLY, "Megatron's indexer does not support this value")
    if interleaved is None and config.get("indexer_rope_interleave") is None:
        raise CkptkitError(
            "config.json has no 'indexer_rope_interleave'",
            "restore it from the release (GLM-5: true): without it SGLang rotates the indexer's heads as halves, newer "
            "transformers in pairs",
        )
    if mla.q_rank is None:
        raise unsupported("q_lora_rank null with an indexer", "the indexer reads the compressed queries")
    head_dim = integer(config, "index_head_dim")
    if mla.rope > head_dim:
        message = f"config.json: index_head_dim {head_dim} is less than qk_rope_head_dim {mla.rope}"
        raise CkptkitError(message, "compare both with the release")
    own = _own(config)
    every, first = _schedule(own)
    return Indexer(
        heads=integer(config, "index_n_heads"),
        head_dim=head_dim,
        top_k=integer(config, "index_topk"),
        layers=places(own, True),
        rope_interleaved=flag(config, "indexer_rope_interleave", bool(interleaved)),
        every=every,
        first=first,
    )


def _own(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Whether each layer has an indexer. Sources: transformers `GlmMoeDsaConfig`, SGLang `dsa_layer_skips_topk`."""
    layers, key = integer(config, "num_hidden_layers"), "index_topk_freq"
    given = dict(config)
    if isinstance(pattern := config.get("index_topk_pattern"), str):
        given["index_topk_pattern"] = list(pattern)
    if config.get(key) is not None:
        every, first = integer(config, key), integer(config, "index_skip_topk_offset", 2)
        if every < 1 or first < 1 < every:
            message = f"config.json: {key} {every} with index_skip_topk_offset {first} is invalid"
            raise CkptkitError(message, "compare both with the release")
        given[key] = ["FS"[max(layer + 1 - first, 0) % every != 0] for layer in range(layers)]
    own = agreed_by_layer(given, dict.fromkeys(("indexer_types", "index_topk_pattern", key), _KINDS))
    own = (True,) * layers if own is None else own
    if own and not own[0]:
        raise CkptkitError(
            "config.json: layer 0 shares the indexer of an earlier layer", "compare the list with the release"
        )
    return own


def _schedule(own: Sequence[bool]) -> tuple[int, int]:
    """Megatron's `dsa_indexer_topk_freq` and `dsa_indexer_skip_topk_offset`. Raises CkptkitError if none fit."""
    if all(own):
        return 1, 0
    first = own.index(False)
    later = [layer for layer in range(first, len(own)) if own[layer]]
    every = (later[0] if later else len(own)) + 1 - first
    if any(full != (max(layer + 1 - first, 0) % every == 0) for layer, full in enumerate(own)):
        message = "an indexer in layers at an irregular distance"
        raise unsupported(message, "Megatron only has arguments for an indexer in every Nth layer")
    return every, first


def _indexer(dims: ModelDims, at: NamePrefix | None, *, slime: bool) -> tuple[ParamMapping, ...]:
    """The indexer in megatron-core's modules (from 0.19 on), copied unchanged, or in slime's attention module.

    Every rank holds all of it. slime's rotates the last dimensions of a head. Source: slime
    `slime_plugins/models/glm5/glm5.py`, `hf_to_megatron/deepseek.py` and `megatron_to_hf/deepseekv3.py`, which move the
    dimensions in every model, also where the release turns them as halves (their sizes of 128 and 64 are all models'
    own).
    """
    sizes, mla = dims.indexer, dims.mla
    assert sizes is not None, "a family without an indexer has no such rules"
    assert mla is not None, "an indexer is part of latent attention"
    at, hf = at or decoder(dims, sizes.layers), "self_attn.indexer."
    prefix = "self_attention." if slime else "self_attention.core_attention.indexer."
    linear = prefix if slime else f"{prefix}linear_"
    heads: Op = RotaryLast(sizes.head_dim, mla.rope) if slime else Copy()
    queries = (sizes.heads * sizes.head_dim, mla.q_rank or dims.hidden)
    return (
        at.rule(f"{linear}wq_b.weight", {hf + "wq_b.weight": queries}, heads),
        at.rule(f"{linear}wk.weight", {hf + "wk.weight": (sizes.head_dim, dims.hidden)}, heads),
        at.rule(f"{prefix}k_norm.weight", {hf + "k_norm.weight": (sizes.head_dim,)}, heads),
        at.rule(f"{prefix}k_norm.bias", {hf + "k_norm.bias": (sizes.head_dim,)}, heads),
        at.rule(f"{linear}weights_proj.weight", {hf + "weights_proj.weight": (sizes.heads, dims.hidden)}),
    )


def read_dims(config: Mapping[str, Any]) -> ModelDims:
    """Sizes of a deepseek_v32 or glm_moe_dsa config. Source: transformers `DeepseekV32Config`, `GlmMoeDsaConfig`.

    The indexer of the first rotates dimensions as halves; the config of the second must contain the rotation.
    """
    mla, is_glm = read_mla(config), config["model_type"] == "glm_moe_dsa"
    first = {"first_k_dense_replace": integer(config, "first_k_dense_replace", 3)}
    dims = base_dims(
        config,
        mla=mla,
        head_dim=mla.nope,
        indexer=read_indexer(config, mla, interleaved=None if is_glm else False),
        dense_layers=dense_layers({**config, **first}),
        mtp_layers=integer(config, "num_nextn_predict_layers", 0),
        **read_sigmoid_moe(config, ABSENT if is_glm else {}),
    )
    if dims.mtp_layers > 1 and len(dims.indexer.layers) < dims.layers:  # type: ignore[union-attr]
        message = f"{dims.mtp_layers} multi-token prediction layers with shared indexers"
        raise unsupported(message, "Megatron would use the first one's indexer in all; no release has more than one")
    return dims


def mappings(dims: ModelDims, *, slime: bool = False) -> tuple[ParamMapping, ...]:
    """All rules of a DeepSeek V3 with an indexer, in the names of megatron-core's modules or of slime's."""
    places = [multi_token_prediction(dims, depth)[0] for depth in range(dims.mtp_layers)]
    indexers = (rule for at in (None, *places) for rule in _indexer(dims, at, slime=slime))
    return (*deepseek_v3.mappings(dims), *indexers)


_DIALECTS = {"slime": partial(mappings, slime=True)}


FAMILIES = (
    ModelFamily(
        ("deepseek_v32",),
        ("DeepseekV32ForCausalLM",),
        read_dims,
        mappings,
        _DIALECTS,
        passthrough_suffixes=ROTARY_FREQUENCIES,
        release=Release(drafts=appended_drafts, classes={"Router": "DeepseekV32TopkRouter"}),
    ),
    ModelFamily(
        ("glm_moe_dsa",),
        ("GlmMoeDsaForCausalLM",),
        read_dims,
        mappings,
        _DIALECTS,
        release=Release(drafts=appended_drafts, classes={"Router": "GlmMoeDsaTopkRouter"}),
    ),
)
